"""Bounded replay as arithmetic on positions (ARCHITECTURE section 17, decisions 5 and 6)."""


def adopted_hit(matched: int, window: int) -> int:
    """Cached tokens that a request uses: a match that is no longer than the window saves nothing
    and is not adopted.
    """
    return matched if matched > window else 0


def prefill_start(hit: int, window: int) -> int:
    """First prompt row to encode: the last window below the hit is recomputed for its window
    rows.
    """
    return max(hit - window, 0)


def window_floor(hit: int, window: int) -> int:
    """Lowest position that any window may see: recomputed rows see nothing below the first of
    them.
    """
    return prefill_start(hit, window)


def decoder_floor(length: int, window: int, *, replay: bool) -> int:
    """Lowest position that windows after the last KV source may see: the first row of the prompt's
    replay.
    """
    return max(length - window, 0) if replay else 0
