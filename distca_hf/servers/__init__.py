"""Attention servers: ranks without tokens that compute attention for ranks that train. Training without servers never
imports this."""
