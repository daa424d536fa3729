"""Requests that two servers share: ``kv_transfer_params`` of bodies and answers."""

from typing import Any

from serving.handoff.params import params_of, transfer_of
from serving.handoff.ticket import FIELD, LOST
from serving.request import Request
from serving.server.errors import ApiError
from serving.server.protocol import GenerationBody
from serving.server.worker import Job


def shared(body: GenerationBody, made: list[Request]) -> list[Request]:
    """A body's requests as it wants them shared with another server; UserError or ApiError 400 for
    what cannot be.
    """
    transfer = transfer_of(body.kv_transfer_params)
    if transfer is None:
        return made
    if transfer.tickets is None and body.stream:
        raise ApiError(400, f"{FIELD}: a request that is handed off cannot be streamed", FIELD)
    return transfer.applied(made, seeded=body.seed is not None)


def handoffs(job: Job) -> dict[str, Any]:
    """What the answer says beside its choices: where another server finds those handed off.
    ApiError 503 if that is not known of all of them.
    """
    left = [choice.sequence.left for choice in job.choices if choice.sequence is not None]
    tickets = [ticket for ticket in left if ticket is not None]
    if not tickets:
        return {}
    if len(tickets) < len(job.choices):
        rule = f"{len(tickets)} of {len(job.choices)} choices were handed off"
        raise ApiError(503, f"the hand-off is lost: {rule}", code=LOST)
    return {FIELD: params_of(tickets)}
