"""``GET /`` and ``GET /docs``: the page, the API's documentation, and the files they are made of.

They are plain files: there is no build step. The policy in their headers lets them load and call this server
only, and run no text as code.
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

# Swagger UI writes styles and draws symbols of its own.
DOCS_HEADERS = HEADERS | {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}

router = APIRouter()
files = StaticFiles(directory=FOLDER)


@router.get("/", include_in_schema=False)
async def page() -> FileResponse:
    return FileResponse(FOLDER / "index.html", headers=HEADERS)


@router.get("/docs", include_in_schema=False)
async def docs() -> FileResponse:
    """The OpenAPI document in Swagger UI, which needs no other server."""
    return FileResponse(FOLDER / "docs.html", headers=DOCS_HEADERS)


# Not mounted as an application: below a path that a proxy has taken away, it would look in the wrong place.
@router.get("/page/{path:path}", include_in_schema=False)
async def page_file(path: str, request: Request) -> Response:
    """Styles, scripts and pictures."""
    response = await files.get_response(path, request.scope)
    response.headers.update(HEADERS)
    return response
