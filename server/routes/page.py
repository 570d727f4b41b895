"""``GET /``: the page, and the files it is made of. Plain files: there is no build step.

The policy in its headers lets the page load and call this server only, and run no text as code.
"""

from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

FOLDER = Path(__file__).parent.parent / "page"

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

router = APIRouter()
files = StaticFiles(directory=FOLDER)


@router.get("/", include_in_schema=False)
async def page() -> FileResponse:
    return FileResponse(FOLDER / "index.html", headers=HEADERS)


# Not mounted as an application: below a path that a proxy has taken away, it would look in the wrong place.
@router.get("/page/{path:path}", include_in_schema=False)
async def page_file(path: str, request: Request) -> Response:
    """Styles, scripts and pictures."""
    response = await files.get_response(path, request.scope)
    response.headers.update(HEADERS)
    return response
