"""Tests that the page /docs needs nothing but this service."""

import gzip
import hashlib
import re
from importlib.resources import files
from urllib.parse import urljoin

import httpx
import pytest

from service.http.application import Application
from service.http.documentation import ASSETS, VERSION, asset

# Of the files in the package of Swagger UI.
PINNED = {
    "swagger-ui-bundle.js": "e6a898692f2d768e807c3ba4626068a69a2c5dd960dd6c76f3e4d3a3de180af2",
    "swagger-ui.css": "5ed08757e53da3e026d6cbecc61fe5d43585c9560b302d534ad56692519a273d",
}


async def test_the_page_refers_to_files_of_this_service_only() -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(Application()), base_url="http://test") as http:
        page = (await http.get("/docs")).text
        assert re.findall(r"https?://", page) == []
        assert '"validatorUrl": null' in page
        (document,) = re.findall(r"url: '([^']+)'", page)
        linked = [document, *re.findall(r'(?:src|href)="([^":]+)"', page)]
        assert len(linked) == 3
        for link in linked:
            answer = await http.get(urljoin("/docs", link))
            assert answer.status_code == 200, link
        assert urljoin("/below/docs", document) == "/below/openapi.json"


@pytest.mark.parametrize("name", ASSETS)
async def test_the_files_of_swagger_ui_are_those_of_its_release(name: str) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(Application()), base_url="http://test") as http:
        packed = await http.get(f"/docs/{VERSION}/{name}", headers={"accept-encoding": "gzip"})
        plain = await http.get(f"/docs/{VERSION}/{name}", headers={"accept-encoding": "identity"})
    assert (packed.headers["content-encoding"], "content-encoding" in plain.headers) == ("gzip", False)
    assert packed.headers["content-type"] == plain.headers["content-type"] == ASSETS[name].decode()
    assert packed.content == plain.content == gzip.decompress(asset(name))
    assert hashlib.sha256(plain.content).hexdigest() == PINNED[name]
    assert int(packed.headers["content-length"]) < len(plain.content) / 2


def test_the_licence_is_beside_the_files() -> None:
    folder = files("service.http") / "swagger_ui"
    assert "Apache License" in (folder / "LICENSE").read_text()
    assert VERSION in (folder / "README.md").read_text()
