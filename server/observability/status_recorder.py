"""Records the status of an answer for the log and the trace, which are written after it."""

from starlette.types import Message, Send


class StatusRecorder:
    """Notes the status that passes through ``send``; it stays 0 if the client leaves before an answer."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)
