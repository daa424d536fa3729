"""The one table of the kernels' bounds; every bound names its source.

Sources: [C] the project's contract for kernels on Hopper; [G] the goldens' recommended tolerances;
[A] float32 arithmetic: some units in the last place of a sum of that length.
"""

SERVING_REL = 1e-2  # [C] serving numerics, relative error of a row
REFERENCE_REL_RMS = 1e-3  # [G] reference numerics, inputs given: relative RMS
ATTENTION_REL = 1e-2  # [C] relative error of a row
ATTENTION_ANGLE = 1e-4  # [C] 1 - cosine of a row
SCORE_BF16_ULPS = 1  # [C] index scores against the reference's rounding
DOT_REL = 2e-6  # [A] a float32 dot of some thousand products, relative to the factors' norms
