"""Signed orders, which `rayps_client.signed_orders` defines: the service signs them, and a client checks them."""

from rayps_client.signed_orders import (
    NAME,
    ClientToken,
    Key,
    ModelFacts,
    OrderFacts,
    fingerprint,
    is_client_token,
    order_text,
    verified,
)

__all__ = [
    "NAME",
    "ClientToken",
    "Key",
    "ModelFacts",
    "OrderFacts",
    "fingerprint",
    "is_client_token",
    "order_text",
    "verified",
]
