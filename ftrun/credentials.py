"""What drivers of object stores raise when they find no credentials; by name, as they needn't be installed."""

from __future__ import annotations

_NAMES = frozenset(
    {
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "ProfileNotFound",
        "TokenRetrievalError",
        "SSOTokenLoadError",
        "UnauthorizedSSOTokenError",
        "DefaultCredentialsError",
        "RefreshError",
        "ClientAuthenticationError",
        "CredentialUnavailableError",
    }
)


def missing(error: BaseException) -> bool:
    """Whether an error of a driver says that there are no credentials, or none that can be used."""
    return type(error).__name__ in _NAMES
