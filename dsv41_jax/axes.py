"""Single letters for array axes: the same in comments, einsums, shardings and docstrings."""

AXES = {
    "B": "requests of a batch",
    "T": "consecutive rows of one request in a program",
    "R": "rows of all requests, B * T",
    "L": "slots of an attention list, or rows of a window",
    "N": "entries of a global cache that a page table covers; output rows of a weight",
    "P": "pages of a page table",
    "D": "hidden size",
    "S": "residual streams",
    "H": "query heads (of attention or of the indexer)",
    "K": "width of a head; inputs of a weight",
    "E": "routed experts",
    "F": "expert width",
    "C": "candidate blocks; Engram columns",
    "G": "output-projection groups; compression groups of a chunk",
    "V": "vocabulary",
}
