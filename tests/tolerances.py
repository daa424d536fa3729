"""The one table of tolerances; every bound names its source.

Sources: [G] tests/goldens/README.md, "Recommended tolerances"; on the same page [V] under
vl_mask_p37.npz, [R] under replay_fp32.npz, [X] under extra_vectors.npz; [D] the project's contract
of equality (a row's result across buckets, chunkings, batch sizes and layouts); [A] float32
arithmetic: some units in the last place of a sum of that length, against float64.
"""

FP32_LOGITS_ABS = 1e-4  # [G] float32 mode, end to end; tokens, drafts and selections identical
FP32_BLOCK_ABS = 5e-5  # [G] float32 mode, one block
REPLAY_LOGITS_ABS = 1e-4  # [R] float32 mode; tokens identical
IMAGE_LOGITS_ABS = 1e-4  # [X] float32 mode, image spans

GEMM_BF16_ULPS = 1  # [G] FP8 and FP4 products against quant_vectors
SPARSE_BF16_ULPS = 1  # [G] and [X] attention output with blockwise rounding
SINKHORN_ABS = 2e-6  # [G]

# [G] quant mode, inputs taken from the trace
TRACE_REL_RMS = 1e-3
TRACE_MAX_ABS = 0.03
TRACE_DIFFERENT_FRACTION = 0.005
TRACE_F32_ABS = 2e-6
TRACE_F32_RECOMPUTED_ABS = 1e-3  # an intermediate (h_mid) was recomputed, not taken from the trace
SCORE_TIE_BF16_ULPS = 1  # index sets may differ where scores are this close

# [G] quant mode, end to end
E2E_COSINE_MEAN = 0.985
E2E_COSINE_MIN = 0.90
E2E_ARGMAX = 0.70
IMAGE_QUANT_COSINE = 0.98  # [V] per row

ACROSS_BUCKETS_ABS = 1e-5  # [D] float32: other bucket, chunking or batch size; tokens equal
SHARDED_ABS = 1e-4  # [D] float32: sharded against local; tokens equal

# [M] goldens/README.md, "Measured", summation-order sensitivity: quant mode, inputs from the trace
ORDER_REL_RMS = 1.4e-4
ORDER_DIFFERENT_FRACTION = 0.001

# [A] float32 against a float64 oracle of the same operation
F32_REL = 2e-6  # one expression, or a dot of up to some thousand products relative to its norm
# ARCHITECTURE 4.5: a softmax over the global maximum against blockwise rounding, 640 random keys
ONE_PASS_REL_RMS = 2e-3
# [G] quant mode: what a third implementation reached teacher-forced, rounded down
E2E_DECODE_COSINE_MEAN = 0.985

# Gaps of the two best tokens where a text first differs from plain decoding, which runs in another
# bucket: 200 texts of the golden checkpoint had a widest of 1.50 and 0.56 at 95 %, beside a median
# of 0.54 over all tokens. [M] quant mode, "prefill vs token-by-token decode": logits differ by up
# to 1.3, their gap by twice as much.
SPECULATIVE_TIE, SPECULATIVE_TIE_95 = 2.0, 0.75
