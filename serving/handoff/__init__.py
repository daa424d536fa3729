"""Requests that one engine begins and another one goes on with: the prefill/decode split."""
