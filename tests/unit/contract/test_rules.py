"""Tests the rules file: rules for topics and callers, and a line for each mistake."""

from pathlib import Path

import pytest

from service.contract import CallerRule, CorsRule, Guarantee, Rules, SettingsError, SharedSettings
from service.core.settings import Settings

DIGEST = "ab" * 32
CORS = '[[cors]]\norigins = ["https://a.example"]\n'
CALLER = f'[[callers]]\nname = "a"\ntoken_sha256 = "{DIGEST}"\n'


def read(file: Path) -> Rules:
    """Read the rules of a file that the environment names."""
    return Rules.read(Settings.from_env({"FENCEPOST_RULES": str(file)}).rules)


def test_callers_are_read_with_their_topics_and_rate() -> None:
    text = f'[[callers]]\nname = "shop"\ntoken_sha256 = "{DIGEST}"\ntopics = ["orders.*"]\nrate = 2.5\n'
    (shop,) = Rules.parse(text).callers
    assert shop == CallerRule("shop", (DIGEST,), ("orders.*",), 2.5)
    assert DIGEST not in repr(shop)
    (anywhere,) = Rules.parse(f'[[callers]]\nname = "a"\ntoken_sha256 = "{DIGEST}"\n').callers
    assert (anywhere.topics, anywhere.rate) == (("*",), None)


def test_origins_are_read_with_their_headers() -> None:
    text = '[[cors]]\norigins = ["https://a.example", "https://*.b.example:8443"]\nheaders = ["X-A"]\nmax_age_s = 5\n'
    assert Rules.parse(text + '[[cors]]\norigins = ["http://localhost:3000", "http://[::1]"]').cors == (
        CorsRule(("https://a.example", "https://*.b.example:8443"), ("X-A",), 5),
        CorsRule(("http://localhost:3000", "http://[::1]"), (), 600),
    )
    assert Rules.parse("").cors == ()


@pytest.mark.parametrize(
    "origin",
    [
        "*",
        "null",
        "a.example",
        "https://",
        "https://a.example/",
        "https://a.example/b",
        "https://A.example",
        "https://a.example:443",
        "http://a.example:80",
        "https://*",
        "https://*.com",
        "https://a.*.example",
        "https://*.*.example.com",
        "https://a*.example.com",
        "https://-a.example",
        "https://a..example",
        "https://a.example\\n",
        "https://user@a.example",
        "ftp://a.example",
        "https://a.example, https://b.example",
    ],
)
def test_what_is_no_origin_of_a_browser_is_refused(origin: str) -> None:
    with pytest.raises(SettingsError, match="2: origins: write origins as browsers send them"):
        Rules.parse(f'[[cors]]\norigins = ["https://a.example", "{origin}"]')


def test_a_caller_has_several_tokens_while_one_replaces_the_other() -> None:
    text = f'[[callers]]\nname = "shop"\ntoken_sha256 = [\n  "{DIGEST}",\n  "{"cd" * 32}",\n]\n'
    (shop,) = Rules.parse(text).callers
    assert shop.token_sha256 == (DIGEST, "cd" * 32)
    assert "cd" not in repr(shop)


@pytest.mark.parametrize(
    "digests",
    [
        pytest.param("[]", id="no digest"),
        pytest.param(f'["{DIGEST}", "secret"]', id="a token in the clear"),
        pytest.param(f'["{DIGEST}", 7]', id="a number"),
        pytest.param(f'[["{DIGEST}"]]', id="a list of lists"),
    ],
)
def test_each_digest_of_a_list_is_checked(digests: str) -> None:
    with pytest.raises(SettingsError, match=r"^rules:3: token_sha256: write 64 hexadecimal digits"):
        Rules.parse(f'[[callers]]\nname = "a"\ntoken_sha256 = {digests}\n')


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (f'"{DIGEST}"', f'["{"cd" * 32}", "{DIGEST}"]'),
        (f'["{"cd" * 32}", "{DIGEST}"]', f'"{DIGEST}"'),
        (f'["{DIGEST}"]', f'["{DIGEST}"]'),
    ],
)
def test_no_two_callers_share_a_token(first: str, second: str) -> None:
    tables = [f'[[callers]]\nname = "{name}"\ntoken_sha256 = {of}\n' for name, of in (("a", first), ("b", second))]
    with pytest.raises(SettingsError, match=r"^rules:6: token_sha256: another caller has it"):
        Rules.parse("".join(tables))


def test_a_caller_may_be_known_by_certificates_beside_or_instead_of_tokens() -> None:
    names = '["uri:spiffe://example.com/shop", "subject:CN=shop,O=Example", "dns:shop.example.com", "email:a@b.c"]'
    (shop,) = Rules.parse(f'[[callers]]\nname = "shop"\ncertificates = {names}\n').callers
    assert (shop.token_sha256, len(shop.certificates), shop.certificates[1]) == ((), 4, "subject:CN=shop,O=Example")
    (both,) = Rules.parse(f'[[callers]]\nname = "a"\ntoken_sha256 = "{DIGEST}"\ncertificates = ["dns:a"]\n').callers
    assert (both.token_sha256, both.certificates) == ((DIGEST,), ("dns:a",))


@pytest.mark.parametrize(
    "names", ["[]", '"dns:a"', '["shop"]', '["dns:"]', '["subject:shop"]', '["ip:10.0.0.1"]', "[7]"]
)
def test_what_is_no_name_of_a_certificate_is_refused(names: str) -> None:
    with pytest.raises(SettingsError, match=r"^rules:3: certificates: write names of certificates, each with its kind"):
        Rules.parse(f'[[callers]]\nname = "a"\ncertificates = {names}\n')


def test_no_two_callers_share_the_name_of_a_certificate() -> None:
    tables = [f'[[callers]]\nname = "{name}"\ncertificates = ["dns:a", "uri:{name}"]\n' for name in "ab"]
    with pytest.raises(SettingsError, match=r"^rules:6: certificates: another caller has one of them"):
        Rules.parse("".join(tables))


def test_rules_must_be_a_file(tmp_path: Path) -> None:
    for no_file in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(SettingsError) as caught:
            read(no_file)
        (line,) = str(caught.value).splitlines()
        assert line.startswith(f"FENCEPOST_RULES='{no_file}' cannot be read: ")
        assert line.endswith("; set the path of a TOML file, or leave it empty")
    file = tmp_path / "rules.toml"
    file.write_text('[[topics]]\npattern = "telemetry.*"\nguarantee = "idempotent"\n')
    rules = read(file)
    assert rules.guarantee("telemetry.cpu") is Guarantee.IDEMPOTENT
    assert rules.guarantee("orders") is Guarantee.EXACTLY_ONCE


def test_requests_without_a_key_are_allowed_unless_a_rule_refuses_them() -> None:
    rules = Rules.parse('[[topics]]\npattern = "a"\nkeyless = "refuse"\n[[topics]]\npattern = "b"\nkeyless = "allow"')
    assert [rules.rule(topic).keyless for topic in "abc"] == ["refuse", "allow", "allow"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[[topics]]\npattern = "a"\nguarantee = "twice"\n', 3),
        ('[[topics]]\npattern = "a"\nschema = ""\n', 3),
        ('[[topics]]\npattern = "a"\nkeyless = "never"\n', 3),
        ('[[topics]]\nschema = 1\npattern = "a"\n', 2),
        ('[[topics]]\n\nguarantee = "idempotent"\n', 1),
        ('[[topics]]\npattern = "a"\n\n[[topics]]\npattern = "b"\nguarante = "idempotent"\n', 6),
        ('[topic]\npattern = "a"\n', 1),
        ('[[topics]]\npattern = "a"\nkey_ttl_s = 0\n', 3),
        ('[[topics]]\npattern = "a"\nkey_ttl_s = 315360001\n', 3),
        ('[[topics]]\npattern = "a"\nkey_ttl_s = true\n', 3),
        ('[[topics]]\npattern = "a"\nkey_ttl_s = 86400.5\n', 3),
        (f'[[callers]]\nname = "a b"\ntoken_sha256 = "{DIGEST}"\n', 2),
        ('[[callers]]\nname = "a"\ntoken_sha256 = "secret"\n', 3),
        ('[[callers]]\nname = "a"\n', 1),
        (f'[[callers]]\nname = "a"\ntoken_sha256 = "{DIGEST}"\ntopics = "a"\n', 4),
        (f'[[callers]]\nname = "a"\ntoken_sha256 = "{DIGEST}"\ntopics = []\n', 4),
        (f'[[callers]]\nname = "a"\ntoken_sha256 = "{DIGEST}"\ngroups = "a"\n', 4),
        (f'[[callers]]\nname = "a"\ntoken_sha256 = "{DIGEST}"\ngroups = [""]\n', 4),
        (f'[[callers]]\nname = "a"\ntoken_sha256 = "{DIGEST}"\nrate = 0\n', 4),
        (f'[[callers]]\nname = "a"\ntoken_sha256 = "{DIGEST}"\nrates = 1\n', 4),
        (f'[[topics]]\npattern = "a"\n[[callers]]\nname = "a"\ntoken_sha256 = "{DIGEST}"\nrate = true\n', 6),
        (2 * f'[[callers]]\nname = "a"\ntoken_sha256 = "{DIGEST}"\n', 5),
    ],
)
def test_a_wrong_rule_is_reported_with_its_line(text: str, line: int) -> None:
    with pytest.raises(SettingsError) as caught:
        Rules.parse(text, "rules.toml")
    assert str(caught.value).startswith(f"rules.toml:{line}: ")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("topics = [1]", "1: topics: write [[topics]], once for each"),
        ("topics = [[1]]", "1: topics: write [[topics]], once for each"),
        ('topics = [{pattern = "a"}, "b"]', "1: topics: write [[topics]], once for each"),
        ("topics = 1979-05-27", "1: topics: write [[topics]], once for each"),
        ('[topics]\npattern = "a"', "1: topics: write [[topics]], once for each"),
        ('callers = "x"', "1: callers: write [[callers]], once for each"),
        ("callers = [true]", "1: callers: write [[callers]], once for each"),
        ("callers = {}", "1: callers: write [[callers]], once for each"),
        ('[cors]\norigins = ["https://a.example"]', "1: cors: write [[cors]], once for each"),
        ("[[cors]]", "1: origins: write"),
        ("[[cors]]\norigins = []", "2: origins: write"),
        ('[[cors]]\norigins = "https://a.example"', "2: origins: write"),
        (CORS + "origin = 1", "3: origin: no such setting"),
        (CORS + 'headers = "X-A"', "3: headers: write"),
        (CORS + 'headers = ["a b"]', "3: headers: write"),
        (CORS + 'headers = [""]', "3: headers: write"),
        (CORS + "max_age_s = -1", "3: max_age_s: write"),
        (CORS + "max_age_s = true", "3: max_age_s: write"),
        (CORS + "max_age_s = 100000", "3: max_age_s: write"),
        (2 * CORS, "4: origins: another"),
        ("[[topics]]\npattern = 1", "2: pattern: write"),
        ('[[topics]]\npattern.glob = "a"', "2: pattern: write"),
        ('[[topics]]\npattern = "a"\nguarantee = ["exactly_once"]', "3: guarantee: write"),
        ('[[topics]]\npattern = "a"\nguarantee = {}', "3: guarantee: write"),
        ('[[topics]]\npattern = "a"\nschema = ["a.json"]', "3: schema: write"),
        ('[[topics]]\npattern = "a"\nkeyless = ["refuse"]', "3: keyless: write one of allow, refuse"),
        ('[[topics]]\npattern = "a"\nfindings = "error"', "3: findings: write kinds or severities of findings"),
        ('[[topics]]\npattern = "a"\nfindings = []', "3: findings: write kinds or severities of findings"),
        ('[[topics]]\npattern = "a"\nfindings = [1]', "3: findings: write kinds or severities of findings"),
        (f'[[callers]]\nname = ["a"]\ntoken_sha256 = "{DIGEST}"', "2: name: write"),
        ('[[topics]]\nguarantee = "idempotent"\n[[topics]]\npattern = "b"', "1: pattern: write"),
        ('[[topics]]\npattern = "a"\n\n\n\n[[topics]]\npattern = 2', "7: pattern: write"),
        ('[[callers]]\nname = "a"\ntoken_sha256 = 7', "3: token_sha256: write"),
        (CALLER + "topics = {}", "4: topics: write"),
        (CALLER + "topics = [1]", "4: topics: write"),
        (CALLER + 'rate = "1"', "4: rate: write"),
        (CALLER + "rate = nan", "4: rate: write"),
        (CALLER + "rate = 1e-300", "4: rate: write"),
        (CALLER + "rate = 1" + "0" * 400, "4: rate: write"),
        (CALLER + "rate = 1" + "0" * 5_000, " "),
        (CALLER + '"a\\nb" = 1', "1: 'a\\nb': no such setting"),
        ('"a\\nb" = 1', "1: 'a\\nb': no such section"),
        ("topics = " + "[" * 5_000, " "),
        ("topics", " "),
    ],
    ids=lambda text: text[:40].replace("\n", " "),
)
def test_a_rule_of_a_wrong_shape_is_one_line(text: str, named: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Rules.parse(text, "rules.toml")
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"rules.toml:{named}")


def test_the_findings_that_count_are_those_of_the_first_rule_that_matches() -> None:
    rules = Rules.parse('[[topics]]\npattern = "a*"\nfindings = ["error", "stuck"]\n[[topics]]\npattern = "*"\n')
    assert [rules.rule(topic).findings for topic in ("ab", "b")] == [("error", "stuck"), ()]


def test_two_callers_without_a_name_are_one_mistake_each() -> None:
    first, second = (f'[[callers]]\ntoken_sha256 = "{digit * 64}"\n' for digit in "01")
    with pytest.raises(SettingsError) as caught:
        Rules.parse(first + second, "rules.toml")
    assert [line.split()[0] for line in str(caught.value).splitlines()] == ["rules.toml:1:", "rules.toml:3:"]


def test_the_first_rule_that_matches_counts() -> None:
    rules = Rules.parse(
        '[[topics]]\npattern = "a.exact"\n[[topics]]\npattern = "a.*"\nguarantee = "idempotent"\n', "rules.toml"
    )
    assert rules.guarantee("a.exact") is Guarantee.EXACTLY_ONCE
    assert rules.guarantee("a.other") is Guarantee.IDEMPOTENT
    assert rules.guarantee("A.other") is Guarantee.EXACTLY_ONCE


def test_the_retention_of_keys_is_that_of_their_topic_and_must_outlive_the_timeouts() -> None:
    text = '[[topics]]\npattern = "stripe.*"\nkey_ttl_s = 259200\n[[topics]]\npattern = "short"\nkey_ttl_s = 199\n'
    rules = Rules.parse(text)
    assert [rules.rule(topic).key_ttl_s for topic in ("stripe.paid", "short", "orders")] == [259_200, 199, 0]
    assert rules.longest_ttl_s == 259_200
    assert Rules().longest_ttl_s == 0
    assert rules.conflicts(SharedSettings(rules="rules.toml")) == [
        "rules.toml: key_ttl_s = 199 of the topics 'short' is too short for the timeouts: write 200 or more"
    ]
    assert rules.conflicts(SharedSettings(request_timeout_ms=5_000, transaction_timeout_ms=5_000)) == []


QUARANTINE = """\
[[topics]]
pattern = "orders"
schema = "order.json"
quarantine = "{letters}"

[[topics]]
pattern = "orders.*"
schema = "order.json"

[[topics]]
pattern = "plain"
guarantee = "idempotent"

[[sources]]
name = "shop"
topic = "paid"
idempotency_key = {{ sha256 = "body" }}
signature = "none"
key_ttl_s = {ttl_s}
quarantine = "{of_shop}"
"""


def test_a_quarantine_topic_is_named_by_topics_and_by_sources() -> None:
    rules = Rules.parse(QUARANTINE.format(letters="letters", of_shop="others", ttl_s=259_200))
    assert (rules.rule("orders").quarantine, rules.sources[0].quarantine) == ("letters", "others")
    assert rules.quarantine_topics == {"letters", "others"}
    assert Rules().quarantine_topics == frozenset()
    assert rules.longest_ttl_s == 259_200, "the ledger must keep the keys of the source too"
    assert rules.conflicts(SharedSettings()) == []


@pytest.mark.parametrize(
    ("letters", "of_shop", "fault"),
    [
        ("orders", "letters", "'orders' of the topics 'orders': the rule 'orders' gives it a schema or a quarantine"),
        ("orders.bad", "letters", "'orders.bad' of the topics 'orders': the rule 'orders.*' gives it a schema"),
        ("letters", "orders.bad", "'orders.bad' of the source 'shop': the rule 'orders.*' gives it a schema"),
        ("letters", "plain", "'plain' of the source 'shop': it is idempotent by the rule 'plain': name one that is"),
        ("fencepost.ledger", "letters", "'fencepost.ledger' of the topics 'orders': it is internal: name another"),
        ("letters", "paid", "'paid' of the source 'shop': its deliveries go there: name another topic"),
    ],
)
def test_what_is_refused_cannot_be_refused_again(letters: str, of_shop: str, fault: str) -> None:
    rules = Rules.parse(QUARANTINE.format(letters=letters, of_shop=of_shop, ttl_s=259_200))
    (line,) = rules.conflicts(SharedSettings(rules="rules.toml"))
    assert line.startswith(f"rules.toml: quarantine = {fault}")


def test_a_quarantine_without_a_schema_would_stay_empty() -> None:
    rules = Rules.parse('[[topics]]\npattern = "a"\nquarantine = "b"\n')
    (line,) = rules.conflicts(SharedSettings(rules="rules.toml"))
    assert line.startswith("rules.toml: quarantine of the topics 'a': only what a schema refuses goes there")
    with pytest.raises(SettingsError, match=r"^rules:3: quarantine: write the name of a topic"):
        Rules.parse('[[topics]]\npattern = "a"\nquarantine = "b c"\n')


def test_the_retention_of_a_source_must_outlive_the_timeouts() -> None:
    rules = Rules.parse(QUARANTINE.format(letters="letters", of_shop="others", ttl_s=199))
    assert rules.conflicts(SharedSettings(rules="rules.toml")) == [
        "rules.toml: key_ttl_s = 199 of the source 'shop' is too short for the timeouts: write 200 or more"
    ]
