"""Tests what an issuer of tokens does for the service, on the fake and on a real one.

The real one is Keycloak, which `python -m tests.identity` fetches. A process of the service takes the tokens.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from deploy.stack import Kafka, Redis, Service
from service.contract.wire.ids import event_id
from tests import identity
from tests.conftest import MakeTopic
from tests.contract.fake_issuer import Client, FakeIssuer, IssuerUnderTest, Realm
from tests.identity import Keycloak

CLIENTS = {
    "shop": Client(topics=["*"]),
    "till": Client(topics=["tills.*"]),
    "brief": Client(life_s=1),
    "stray": Client(audience="another"),
}
LEEWAY_S = 1


@pytest.fixture(scope="module", params=["fake", "keycloak"])
def issuer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[IssuerUnderTest]:
    if request.param == "fake":
        with FakeIssuer() as fake:
            yield fake
    else:
        if not identity.is_wanted():
            pytest.skip(identity.WHY_NOT)
        with Keycloak(tmp_path_factory.mktemp("keycloak")) as real:
            yield real


@pytest.fixture(scope="module")
def realms(issuer: IssuerUnderTest) -> tuple[Realm, Realm]:
    """The realm whose tokens are taken, and another one of the same issuer."""
    return issuer.realm("shop", CLIENTS), issuer.realm("other", CLIENTS)


@pytest.fixture(scope="module")
def discovered(issuer: IssuerUnderTest) -> Realm:
    """Make a realm for a rule without `jwks_url`: the keys are found by OpenID discovery."""
    return issuer.realm("discovered", CLIENTS)


@pytest.fixture(scope="module")
def served(
    kafka: Kafka,
    redis: Redis,
    realms: tuple[Realm, Realm],
    discovered: Realm,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Service]:
    """One process of the service for all tests."""
    folder: Path = tmp_path_factory.mktemp("served")
    (folder / "rules.toml").write_text(
        f"""
[[issuers]]
name = "corp"
issuer = "{realms[0].issuer}"
jwks_url = "{realms[0].jwks_url}"
audience = "fencepost"
azp = ["shop", "till", "brief", "stray"]
name_claim = "azp"
topics_claim = "topics"
leeway_s = {LEEWAY_S}

[[issuers]]
name = "found"
issuer = "{discovered.issuer}"
audience = "fencepost"
name_claim = "azp"
"""
    )
    environment = {
        "FENCEPOST_NAMESPACE": f"i-{uuid.uuid4().hex[:12]}",
        "FENCEPOST_RULES": str(folder / "rules.toml"),
        "FENCEPOST_SLOTS": "1",
        "FENCEPOST_SLOTS_MAX": "2",
    }
    with Service(folder, kafka=kafka.bootstrap, redis=redis.url, env=environment) as service:
        yield service
    assert "Traceback" not in service.log.read_text(), service.tail(60)


@pytest.fixture
async def http(served: Service) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=served.url, timeout=30.0, trust_env=False) as client:
        yield client


async def post(http: httpx.AsyncClient, topic: str, token: str, key: str) -> httpx.Response:
    headers = {"idempotency-key": key, "authorization": f"Bearer {token}"}
    return await http.post("/events", json={"topic": topic, "value": 1}, headers=headers)


async def refusal(http: httpx.AsyncClient, topic: str, token: str) -> str:
    """Post with a token that is not taken, and return why."""
    answer = await post(http, topic, token, uuid.uuid4().hex)
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (401, "invalid-token")
    assert answer.headers["www-authenticate"] == 'Bearer error="invalid_token"'
    assert token not in answer.text
    return str(problem["detail"])


async def test_the_tokens_of_a_realm_name_callers(
    http: httpx.AsyncClient, realms: tuple[Realm, Realm], make_topic: MakeTopic
) -> None:
    realm, other = realms
    topic, key = make_topic(), uuid.uuid4().hex
    first, renewed = realm.token("shop"), realm.token("shop")
    assert first != renewed
    answers = [await post(http, topic, token, key) for token in (first, renewed)]
    assert [answer.status_code for answer in answers] == [201, 201], answers[0].text
    assert answers[0].content == answers[1].content
    assert answers[0].json()["id"] == event_id(key, "issuer:corp:shop").hex()
    forbidden = await post(http, topic, realm.token("till"), key)
    assert (forbidden.status_code, forbidden.json()["code"]) == (403, "forbidden-topic")
    assert (await refusal(http, topic, realm.token("stray"))).startswith("Authorization: aud: ")
    assert (await refusal(http, topic, other.token("shop"))).startswith("Authorization: iss: ")


async def test_an_issuer_s_own_configuration_names_the_place_of_its_keys(
    http: httpx.AsyncClient, discovered: Realm, make_topic: MakeTopic
) -> None:
    topic, key = make_topic(), uuid.uuid4().hex
    answer = await post(http, topic, discovered.token("shop"), key)
    assert answer.status_code == 201, answer.text
    assert answer.json()["id"] == event_id(key, "issuer:found:shop").hex()
    assert (await refusal(http, topic, discovered.token("stray"))).startswith("Authorization: aud: ")


async def test_keys_change_and_tokens_expire_while_the_service_runs(
    http: httpx.AsyncClient, realms: tuple[Realm, Realm], make_topic: MakeTopic
) -> None:
    realm, topic = realms[0], make_topic()
    brief, old = realm.token("brief"), realm.token("shop")
    for token in (brief, old):
        assert (await post(http, topic, token, uuid.uuid4().hex)).status_code == 201
    await asyncio.sleep(CLIENTS["brief"].life_s + LEEWAY_S + 1.0)
    assert (await refusal(http, topic, brief)).startswith("Authorization: exp: the token has expired")
    realm.add_key()
    realm.withdraw_old_keys()
    new = realm.token("shop")
    assert new.partition(".")[0] != old.partition(".")[0]
    await until_written(http, topic, new)
    assert (await post(http, topic, old, uuid.uuid4().hex)).status_code in (401, 503)  # its key is withdrawn
    realm.add_key()  # the other one stays published
    assert (await post(http, topic, new, uuid.uuid4().hex)).status_code == 201


async def until_written(http: httpx.AsyncClient, topic: str, token: str) -> None:
    """Post with a token of a new key until it is taken. It is never refused for good.

    The service reads the keys for an unknown one every REFETCH_LEAST_S at most.
    """
    key = uuid.uuid4().hex
    async with asyncio.timeout(30.0):
        while (answer := await post(http, topic, token, key)).status_code != 201:
            assert (answer.status_code, answer.json()["code"]) == (503, "not-written"), answer.text
            await asyncio.sleep(min(int(answer.headers["retry-after"]), 1))
