"""Checks the issuers of tokens: whether the keys of each can be read from here."""

from service.cli.finding import Finding, Level, grouped
from service.contract import Rules


async def examine(rules: Rules) -> list[Finding]:
    """Read the keys of each issuer of the rules, as the service does."""
    if not rules.issuers:
        return []
    from service.identity.jwks import KeysUnreadable, key_source_of

    rows: list[tuple[str, Finding]] = []
    for rule in rules.issuers:
        try:
            _, keys = await key_source_of(rule).keys()
            keys.check_usable()
        except KeysUnreadable as error:
            change = "correct issuer, jwks_url or jwks_file in the rules, or let this machine reach the issuer"
            rows.append((rule.name, Finding("issuers.keys", Level.ERROR, str(error), change)))
        else:
            left_out = "; ".join(keys.left_out)
            level, more = (Level.WARNING, f", without {left_out}") if left_out else (Level.OK, "")
            change = "tokens that such a key signs are refused: ask for another key" if left_out else ""
            rows.append((rule.name, Finding("issuers.keys", level, f"{len(keys)} keys{more}", change)))
    return list(grouped(rows))
