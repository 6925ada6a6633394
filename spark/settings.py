"""The settings of a run: the environment that the job shares with the service, and the options of each command."""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from service.contract import PREFIX, Rules, SettingsError, SharedSettings
from spark.silences import Silence

HOUR_MS: Final = 3_600_000

# The largest offset of Kafka, and the largest bigint of Spark.
OFFSETS_MOST: Final = 2**63 - 1

CSV: Final = "csv"
JSON: Final = "json"
PARQUET: Final = "parquet"
SLACK: Final = "slack"
"""Formats of findings: all but the last of the command `findings`, JSON and SLACK of the webhook."""

URL_CHARS_MOST: Final = 2000

KEY_BYTES: Final = (24, 64)
"""The least and the most bytes of a key of Standard Webhooks."""
SECRETS_MOST: Final = 2
"""The secrets of a webhook: two while one replaces the other."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command line. Units are in the names."""

    lake: str
    report: str
    topics: tuple[str, ...] = ()
    without_topics: tuple[str, ...] = ()
    max_records: int | None = None
    grace_s: int = 60
    window_h: int = 168
    skip_ids: bool = False
    publish: bool = True
    replace_findings: bool = False
    identity: Mapping[str, str] = field(default_factory=dict)
    keep_days: int | None = None
    optimize: bool = False
    vacuum_h: int | None = None
    fail_on: tuple[str, ...] = ()
    silences: str = ""
    webhook: str = field(default="", repr=False)
    webhook_secret: str = ""
    webhook_format: str = JSON
    webhook_after: int = 1
    dry_run: bool = False
    sinks: str = ""
    recheck_sinks: bool = False
    follow: bool = False
    pause_s: int = 30
    alive_file: str = ""


@dataclass(frozen=True, kw_only=True)
class FindingsOptions:
    """The options of the command `findings`.

    `since_ms` is the time from which evidence counts; None for the window of the last run. `output` is the folder of
    Parquet files, empty for the other formats, which are printed.
    """

    lake: str
    kinds: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    since_ms: int | None = None
    format: str = JSON
    output: str = ""


@dataclass(frozen=True, kw_only=True)
class RatesOptions:
    """The options of the command `rates`: `since_ms` as in FindingsOptions, `by_instance`: a row for each process,
    `by_caller`: for each caller."""

    lake: str
    topics: tuple[str, ...] = ()
    since_ms: int | None = None
    by_instance: bool = False
    by_caller: bool = False
    format: str = JSON


@dataclass(frozen=True, kw_only=True)
class RepairOptions:
    """The options of the command `repair`: `kinds`, `topics` and `since_ms` as in FindingsOptions.

    `bodies` are files with the bytes of lost events, `scopes` the callers by which their keys have ids, `into` the
    topic that gets records, `clean` the topic that is written without surplus copies.
    """

    lake: str
    kinds: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    since_ms: int | None = None
    execute: bool = False
    bodies: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()
    url: str = ""
    token_file: str = ""
    cafile: str = ""
    new_keys: bool = False
    into: str = ""
    bodies_out: str = ""
    clean: str = ""

    def shown(self) -> dict[str, Any]:
        """Return the options that are not the default, for the lake."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}


@dataclass(frozen=True, slots=True)
class Webhook:
    """Where a run sends new findings: the URL, the shape of the body (JSON or SLACK), after how many runs that had the
    finding, and the keys that sign a request, none for requests without a signature."""

    url: str = field(repr=False)
    format: str = JSON
    after: int = 1
    keys: tuple[bytes, ...] = field(default=(), repr=False)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run, validated; `silences` are those of the file that the options name."""

    shared: SharedSettings
    options: Options
    rules: Rules = field(default_factory=Rules)
    silences: tuple[Silence, ...] = ()
    webhook: Webhook | None = None

    @property
    def grace_ms(self) -> int:
        """How long after the timeouts a missing record is still expected, ms."""
        return self.options.grace_s * 1000

    @property
    def max_settle_ms(self) -> int:
        """How long after its acceptance the outcome of a request is final and visible at the latest, ms."""
        return self.shared.timeouts_ms + self.grace_ms

    @property
    def key_ttl_ms(self) -> int:
        """Key retention of topics without a rule for it, ms."""
        return self.shared.key_ttl_s * 1000

    @property
    def longest_ttl_ms(self) -> int:
        """The longest key retention of all topics, ms."""
        return max(self.key_ttl_ms, 1000 * self.rules.longest_ttl_s)


def rules_of(shared: SharedSettings, options: Options) -> Rules:
    """Read the rules of a run: those of FENCEPOST_RULES, with the sinks of --sinks if that is given.

    Raises SettingsError with a line for each mistake.
    """
    rules = Rules.read(shared.rules)
    if options.sinks:
        given = Rules.read(options.sinks)
        if given != Rules(sinks=given.sinks):
            raise SettingsError(f"--sinks {options.sinks}: write [[sinks]] only; other rules belong into {PREFIX}RULES")
        rules = replace(rules, sinks=given.sinks)
    _check_lateness(Settings(shared=shared, options=options, rules=rules))
    return rules


def _check_lateness(settings: Settings) -> None:
    """Check that the window still has an event when its time to arrive in a sink is over; SettingsError otherwise.

    No run would find that the event is missing.
    """
    for rule in settings.rules.sinks:
        least_h = (1000 * rule.late_s + settings.max_settle_ms) // HOUR_MS + 1
        if settings.options.window_h < least_h:
            raise SettingsError(
                f"the sink {rule.name!r}: late_s = {rule.late_s} is longer than the report's window of "
                f"{settings.options.window_h} hours, which an event would leave unjudged: write less, or give "
                f"--window-h {least_h} or more"
            )


def glob_regex(globs: Sequence[str]) -> str:
    """Convert globs (`*`, `?`) to one regular expression of the whole name, which Python and Spark interpret alike."""
    parts = ("".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in glob) for glob in globs)
    return f"^(?:{'|'.join(parts)})$"


def matches(globs: Sequence[str], name: str) -> bool:
    """Check whether one of the globs matches the whole name."""
    return bool(globs) and re.fullmatch(glob_regex(globs), name) is not None


def read_webhook(options: Options) -> Webhook | None:
    """Return the webhook of the options, with the URL of the file `@FILE` and the keys of its secret; None without one.

    SettingsError, which shows neither URL nor secret, if they cannot be read, or are none.
    """
    if not options.webhook:
        return None
    url = options.webhook
    if url.startswith("@"):
        try:
            url = Path(url[1:]).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"--webhook {url}: {error}; give a file with the URL in it") from None
    if not is_url(url):
        raise SettingsError(
            f"--webhook: that is no URL of http or https, of at most {URL_CHARS_MOST} characters, without a user: give "
            "https://HOST/PATH, or @FILE for a file with it"
        )
    return Webhook(url, options.webhook_format, options.webhook_after, _keys_of(options.webhook_secret))


def _keys_of(file: str) -> tuple[bytes, ...]:
    """Read the keys that sign the requests to the webhook: a secret in each line of a file; none without a file.

    A secret is `whsec_` and base64, of 24 to 64 bytes
    (https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md).
    """
    if not file:
        return ()
    try:
        secrets = Path(file).read_text(encoding="utf-8").split()
        keys = tuple(base64.b64decode(secret.removeprefix("whsec_"), validate=True) for secret in secrets)
    except OSError as error:
        raise SettingsError(f"--webhook-secret {file}: {error}; give a file with the secret in it") from None
    except ValueError:
        keys = ()
    least, most = KEY_BYTES
    if not 1 <= len(keys) <= SECRETS_MOST or not all(least <= len(key) <= most for key in keys):
        raise SettingsError(
            f"--webhook-secret {file}: write a secret into the file, whsec_ and the base64 of {least} to {most} bytes; "
            "while one secret replaces another, write both, each in a line"
        )
    return keys


_PRINTABLE: Final = re.compile(r"[!-~]+")


def is_url(text: str) -> bool:
    """Check whether a text is an http or https URL that can be requested as it is."""
    try:
        parts = urlsplit(text)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return known and "@" not in parts.netloc and len(text) <= URL_CHARS_MOST and _PRINTABLE.fullmatch(text) is not None
