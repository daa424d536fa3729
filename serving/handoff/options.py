"""What an engine does of a request that two share: the options ``--role`` and ``--handoff``."""

import argparse
from dataclasses import dataclass

from dsv41_jax.errors import UserError
from serving.buckets import Bucket
from serving.handoff.ticket import FIELD
from serving.request import Request

ROLES = "both", "prefill", "decode"
WINDOWS, REPLAY = FORMS = "windows", "replay"
ROLE_HELP = "prefill: only begins requests; decode: only goes on with them; both need --kv-pool"
FORM_HELP = "what a hand-off holds: the last windows of all layers, or nothing that replay can make"
_ENCODING = "encode", "replay", "prefill_full", "prefill_scored"
_DECODING = "decode", "draft", "verify"


@dataclass(frozen=True)
class HandoffOptions:
    """role: "prefill" begins requests and hands them off, "decode" goes on with them, "both" does
    either and whole requests too. form: "windows" (the hand-off holds the private state of the
    slot) or "replay" (the last window of the prompt is encoded again; engines must agree on it).
    """

    role: str = "both"
    form: str = WINDOWS

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"{self.role=} must be one of {ROLES}")
        if self.form not in FORMS:
            raise ValueError(f"{self.form=} must be one of {FORMS}")

    def programs(self, others: list[tuple[str, Bucket]]) -> list[tuple[str, Bucket]]:
        """What such an engine may need of all ``others``, and for hand-offs."""
        unused = {"both": (), "prefill": _DECODING, "decode": _ENCODING}[self.role]
        if self.form == REPLAY and self.role == "decode":
            unused = "prefill_full", "prefill_scored"
        moves = ["take_windows", "put_windows"] if self.form == WINDOWS else ["put_token"]
        kept = [(name, bucket) for name, bucket in others if name not in unused]
        return kept + [(name, Bucket(1, 1, 1)) for name in moves]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--role", choices=ROLES, default="both", help=ROLE_HELP)
    parser.add_argument("--handoff", choices=FORMS, default=WINDOWS, help=FORM_HELP)


def handoff_of(arguments: argparse.Namespace) -> HandoffOptions | None:
    """What the options ask for, None without a pool; UserError if a role needs one."""
    if arguments.kv_pool != "none":
        return HandoffOptions(arguments.role, arguments.handoff)
    if arguments.role != "both":
        raise UserError(f"--role {arguments.role}: needs --kv-pool, through which requests go")
    return None


def check_handoff(request: Request, options: HandoffOptions | None) -> None:
    """UserError for a request that such an engine cannot begin, or not go on with."""
    handed = request.hands_off or request.ticket is not None
    if options is None:
        if handed:
            raise UserError(f"{FIELD}: this engine has no pool to hand requests through")
        return
    if options.role == "prefill" and not request.hands_off:
        rule = "must hold do_remote_decode: true, this engine only begins requests"
        raise UserError(f"{FIELD}: {rule}")
    if options.role == "decode" and request.ticket is None:
        rule = "must be those of a prefill engine's answer, this engine never runs a prompt"
        raise UserError(f"{FIELD}: {rule}")
    if handed and request.prompt_logprobs is not None:
        raise UserError("prompt_logprobs: a request with them cannot be handed off")
    if request.hands_off and (request.max_new_tokens != 1 or request.ticket is not None):
        raise UserError("max_new_tokens: must be 1 for a request that is handed off")
