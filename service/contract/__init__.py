"""What the service and the job share: the wire format, common settings, and the rules.

Standard library only. The job imports nothing else of the service.
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
