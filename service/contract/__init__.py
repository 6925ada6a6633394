"""The wire format, the common settings and the rules, which the service and the job share.

Standard library only. The job imports nothing else of the service.
"""

from service.contract.cors_rules import CorsRule
from service.contract.issuer_rules import IssuerRule
from service.contract.registry_rules import RegistryRule, SchemaRule
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
from service.contract.sink_rules import SinkRule
from service.contract.source_rules import KeyLocation, SignatureRule, SourceRule

__all__ = [
    "PREFIX",
    "CallerRule",
    "CorsRule",
    "Guarantee",
    "IssuerRule",
    "KeyLocation",
    "RegistryRule",
    "Rules",
    "SchemaRule",
    "SettingsError",
    "SharedSettings",
    "SignatureRule",
    "SinkRule",
    "SourceRule",
    "TopicRule",
    "integer",
    "matching",
    "one_of",
    "setting",
    "tls_context",
    "tls_faults",
]
