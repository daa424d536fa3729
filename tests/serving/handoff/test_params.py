"""``kv_transfer_params`` and the options: what is asked for, what is refused, and by which name."""

import json
from dataclasses import replace

import pytest

from dsv41_jax.errors import UserError
from serving.handoff.options import HandoffOptions, check_handoff, handoff_of
from serving.handoff.params import Transfer, params_of, transfer_of
from serving.handoff.ticket import Ticket
from serving.kv_pool.options import PoolOptions
from serving.options import EngineOptions
from serving.request import Request
from serving.server.__main__ import _check, _parser, main

TICKETS = Ticket(b"0123456789abcdef", 700, 5), Ticket(b"f" * 16, 1, 2**32 - 1)
# As vLLM's routers send it to the first server.
AWAY = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}


def test_neither_is_a_whole_request():
    for params in (None, {}, {"do_remote_decode": False}, {"do_remote_prefill": None, "x": 1}):
        assert transfer_of(params) is None


def test_what_one_server_says_the_other_one_understands():
    assert transfer_of(AWAY) == Transfer(None)
    said = json.loads(json.dumps(params_of(TICKETS)))
    assert said["do_remote_prefill"] is True and said["do_remote_decode"] is False
    assert transfer_of(said) == Transfer(TICKETS)


def bad_ticket(**changed) -> dict:
    [good] = params_of(TICKETS[:1])["handoffs"]
    return {"do_remote_prefill": True, "handoffs": [good | changed]}


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_decode": True, "do_remote_prefill": True},
        {"do_remote_decode": "yes"},
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "handoffs": []},
        {"do_remote_prefill": True, "handoffs": {}},
        {"do_remote_prefill": True, "handoffs": ["x"]},
        {"do_remote_prefill": True, "handoffs": [None]},
        bad_ticket(name="0g"),
        bad_ticket(name="00"),
        bad_ticket(name=7),
        bad_ticket(bytes=0),
        bad_ticket(bytes=2**31),
        bad_ticket(bytes=True),
        bad_ticket(bytes=1.5),
        bad_ticket(seed=-1),
        bad_ticket(seed=2**32),
        bad_ticket(seed=None),
    ],
)
def test_bad_params(params):
    with pytest.raises(UserError, match=r"^kv_transfer_params: "):
        transfer_of(params)


def test_requests_to_hand_off_end_with_their_first_token():
    made = [Request((1, 2), 50, min_tokens=9, seed=3), Request((1, 2), 50, seed=4)]
    first, second = Transfer().applied(made, seeded=False)
    assert first == replace(made[0], hands_off=True, max_new_tokens=1, min_tokens=1)
    assert second == replace(made[1], hands_off=True, max_new_tokens=1)


def test_requests_that_go_on_keep_their_draws():
    made = [Request((1,), 50, seed=3), Request((1,), 50, seed=4)]
    drawn = Transfer(TICKETS).applied(made, seeded=False)
    assert [(r.ticket, r.seed) for r in drawn] == [(t, t.seed) for t in TICKETS]
    asked = Transfer(TICKETS).applied(made, seeded=True)
    assert [(r.ticket, r.seed) for r in asked] == [(TICKETS[0], 3), (TICKETS[1], 4)]
    with pytest.raises(UserError, match="2 handoffs for 1 choices"):
        Transfer(TICKETS).applied(made[:1], seeded=True)


PLAIN = Request((1, 2), 1)
AWAY_REQUEST = replace(PLAIN, hands_off=True)
HERE_REQUEST = replace(PLAIN, ticket=TICKETS[0])


@pytest.mark.parametrize(
    ("options", "request_", "wrong"),
    [
        (None, PLAIN, None),
        (None, AWAY_REQUEST, "has no pool"),
        (None, HERE_REQUEST, "has no pool"),
        (HandoffOptions(), PLAIN, None),
        (HandoffOptions(), AWAY_REQUEST, None),
        (HandoffOptions(), HERE_REQUEST, None),
        (HandoffOptions("prefill"), PLAIN, "do_remote_decode: true"),
        (HandoffOptions("prefill"), HERE_REQUEST, "do_remote_decode: true"),
        (HandoffOptions("prefill"), AWAY_REQUEST, None),
        (HandoffOptions("decode"), PLAIN, "never runs a prompt"),
        (HandoffOptions("decode"), AWAY_REQUEST, "never runs a prompt"),
        (HandoffOptions("decode"), HERE_REQUEST, None),
        (HandoffOptions(), replace(AWAY_REQUEST, prompt_logprobs=0), "cannot be handed off"),
        (HandoffOptions(), replace(AWAY_REQUEST, max_new_tokens=2), "must be 1"),
    ],
)
def test_roles(options, request_, wrong):
    if wrong is None:
        check_handoff(request_, options)
    else:
        with pytest.raises(UserError, match=wrong):
            check_handoff(request_, options)


def names(role: str, form: str) -> set[str]:
    pool = PoolOptions("shm", "model")
    options = EngineOptions(kv_pool=pool, handoff=HandoffOptions(role, form))
    return {name for name, _ in options.programs(128)}


def test_an_engine_compiles_what_its_role_needs():
    whole = {name for name, _ in EngineOptions(kv_pool=PoolOptions("shm", "m")).programs(128)}
    windows = {"take_windows", "put_windows"}
    assert names("both", "windows") == whole | windows
    assert names("prefill", "windows") == (whole | windows) - {"decode"}
    encoding = {"encode", "replay", "prefill_scored"}
    assert names("decode", "windows") == (whole | windows) - encoding
    assert names("decode", "replay") == whole - {"prefill_scored"} | {"put_token"}


def test_bad_options():
    for wrong in ({"role": "neither"}, {"form": "pages"}):
        with pytest.raises(ValueError, match="must be one of"):
            HandoffOptions(**wrong)
    with pytest.raises(ValueError, match="must go with kv_pool"):
        EngineOptions(handoff=HandoffOptions())


def test_the_command(tiny_dir, capsys):
    def parsed(*arguments: str):
        return _parser().parse_args(["--checkpoint", "x", *arguments])

    assert handoff_of(parsed()) is None
    assert handoff_of(parsed("--kv-pool=shm")) == HandoffOptions()
    given = parsed("--kv-pool=shm", "--role=decode", "--handoff=replay")
    _check(given)
    assert handoff_of(given) == HandoffOptions("decode", "replay")
    assert main(["--checkpoint", str(tiny_dir), "--role=prefill"]) == 2
    assert "--role prefill: needs --kv-pool" in capsys.readouterr().err
