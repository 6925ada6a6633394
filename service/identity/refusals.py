"""Why a token is not taken. No text has a part of the token: what a log or a page shows must not be one."""

import asyncio

from service.core.problems import INVALID_TOKEN, NOT_WRITTEN, Problem


def invalid_token(why: str) -> Problem:
    """Make the Problem (401) of a token, `why` it is not taken."""
    return Problem(INVALID_TOKEN, f"Authorization: {why}")


class JwksPending(Problem):
    """The token's key is being fetched: verify it again after `fetched`. A request that cannot wait is answered 503."""

    def __init__(self, detail: str, fetch: asyncio.Task[None]) -> None:
        super().__init__(NOT_WRITTEN, detail)
        self._fetch = fetch

    async def fetched(self) -> None:
        """Wait until the fetch has ended, with or without the key; it has a deadline."""
        await asyncio.wait({self._fetch})
