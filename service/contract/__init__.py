"""What the service and the job read of the same environment: the settings that both have, and the rules.

Standard library only: the job imports this package and `wire`, and nothing else of the service.
"""

from service.contract.rules import CallerRule, Guarantee, Rules, TopicRule
from service.contract.settings import (
    PREFIX,
    SettingsError,
    SharedSettings,
    integer,
    matching,
    one_of,
    setting,
    tls_context,
    tls_faults,
)

__all__ = [
    "PREFIX",
    "CallerRule",
    "Guarantee",
    "Rules",
    "SettingsError",
    "SharedSettings",
    "TopicRule",
    "integer",
    "matching",
    "one_of",
    "setting",
    "tls_context",
    "tls_faults",
]
