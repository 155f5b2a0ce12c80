"""Names of torch: which functions and methods give a tensor, by what they are called.

A name that is in no table gives something unknown, of which no rule speaks.
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FACTORIES = _names(
    "arange blackman_window empty empty_strided eye from_numpy full hamming_window hann_window "
    "linspace logspace normal ones rand randint randn randperm range scalar_tensor tensor "
    "tril_indices triu_indices zeros"
)
"""Functions of torch that make a tensor of no tensor, on the host unless told otherwise."""
DRAWING = _names("normal rand randint randn randperm")
"""Functions among them that draw random numbers."""

VIEWS = _names(
    "detach diagonal expand expand_as movedim moveaxis mT narrow permute select squeeze swapaxes "
    "swapdims t transpose unflatten unfold unsqueeze view view_as"
)
"""Methods that give a view."""
MASKS = _names(
    "bool eq ge gt isclose isfinite isin isinf isnan isneginf isposinf le logical_and logical_not "
    "logical_or logical_xor lt ne signbit any all"
)
"""Methods and functions that give a tensor of bools."""
_BOTH = _names(
    "abs absolute acos acosh add addbmm addcdiv addcmul addmm addmv addr amax amin angle arccos "
    "arcsin arctan arctan2 argmax argmin argsort argwhere asin asinh atan atan2 atanh baddbmm "
    "bernoulli bincount bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift "
    "bitwise_xor bmm broadcast_to bucketize ceil clamp clamp_max clamp_min clip clone conj "
    "copysign corrcoef cos cosh count_nonzero cov cross cumprod cumsum deg2rad det diag diag_embed "
    "diagflat diff digamma dist div divide dot erf erfc erfinv exp exp2 expm1 fix flatten flip "
    "fliplr flipud float_power floor floor_divide fmax fmin fmod frac gather gcd ger hardshrink "
    "heaviside histc hypot index_add index_copy index_fill index_put index_select inner inverse "
    "kron lcm ldexp lerp lgamma log log10 log1p log2 log_softmax logaddexp logaddexp2 logcumsumexp "
    "logdet logit logsumexp masked_fill masked_scatter masked_select matmul matrix_power maximum "
    "mean minimum mm mul multinomial multiply mv nan_to_num nanmean nanmedian nanquantile nansum "
    "neg negative nextafter norm outer pinverse poisson polygamma positive pow prelu prod quantile "
    "rad2deg ravel reciprocal relu remainder renorm repeat_interleave reshape resolve_conj "
    "resolve_neg roll rot90 round rsqrt scatter scatter_add scatter_reduce select_scatter sgn "
    "sigmoid sign sin sinc sinh slice_scatter softmax sqrt square std sub subtract sum take "
    "take_along_dim tan tanh tile trace trapezoid tril triu true_divide trunc vander var vdot "
    "xlogy unique_consecutive"
)
METHODS = (
    _BOTH
    | VIEWS
    | MASKS
    | _names(
        "bfloat16 byte char contiguous cdouble cfloat double float half int long new_empty "
        "new_full new_ones new_tensor new_zeros repeat short sum_to_size to_dense type_as "
        "reshape_as clone"
    )
)
"""Methods of a tensor that give one tensor."""
FUNCTIONS = (
    _BOTH
    | VIEWS
    | MASKS
    | _names(
        "_assert_async adaptive_avg_pool1d asarray as_tensor atleast_1d atleast_2d atleast_3d "
        "avg_pool1d batch_norm bilinear block_diag cartesian_prod cat cdist celu celu_ "
        "chain_matmul channel_shuffle column_stack combinations complex concat concatenate conv1d "
        "conv2d conv3d conv_transpose1d conv_transpose2d cosine_similarity cumulative_trapezoid "
        "dropout dsmm dstack einsum embedding empty_like feature_dropout full_like group_norm "
        "hstack instance_norm layer_norm nonzero_static ones_like pairwise_distance pixel_shuffle "
        "polar rand_like randint_like randn_like rms_norm row_stack rrelu rsub searchsorted selu "
        "stack tensordot threshold trapz vstack zeros_like"
    )
) - {"t", "select"}
"""Functions of torch that give one tensor for tensors."""
TELLING = (
    VIEWS
    | _names(
        "abs acos add_ addmm amax amin atan bmm ceil chunk clamp clamp_max clamp_min contiguous "
        "cos cosh cumsum data_ptr detach_ dim erf exp expm1 float floor gather half index_select "
        "isfinite isinf isnan log log10 log1p log2 log_softmax logsumexp long masked_fill "
        "masked_fill_ masked_scatter masked_select matmul mul_ neg new_full new_ones new_tensor "
        "new_zeros numel reciprocal relu requires_grad_ rsqrt scatter scatter_add sigmoid sign sin "
        "sinh size softmax sqrt square tan tanh topk tril triu type_as unbind"
    )
) - {"select", "expand", "t"}
"""Methods by which an object that is called like this is a tensor: NumPy and others lack them."""
SHARED = _names("abs all any argmax item max mean min prod reshape std sum to var")
"""Methods that arrays have too; in a graphed function, a parameter that has one is a tensor."""

PIECES = _names("chunk split tensor_split unbind unsafe_chunk")
"""Methods and functions that give a tuple of tensors; all but `tensor_split` give views."""
PAIRS = _names("topk sort kthvalue mode cummax cummin")
"""Methods and functions that give two tensors."""
ORDERED = _names("max min median nanmedian")
"""Methods and functions that give two tensors where a dimension is given, else one."""
LINALG = _names(
    "cholesky cond cross det diagonal eigvals eigvalsh householder_product inv matmul matrix_exp "
    "matrix_norm matrix_power matrix_rank multi_dot norm pinv solve solve_triangular svdvals "
    "tensorinv tensorsolve vander vecdot vector_norm"
)
"""Functions of `torch.linalg` that give one tensor."""
SEVERAL = _names("multi_head_attention_forward rrelu_")
"""Functions of `torch.nn.functional` that do not give one tensor; `*_with_indices` neither."""

LAYERS = _names(
    "Bilinear Embedding EmbeddingBag Flatten Fold Identity Linear PReLU PixelShuffle "
    "PixelUnshuffle RMSNorm Softmax Softmax2d Unflatten Unfold Upsample ZeroPad1d ZeroPad2d "
    "ChannelShuffle CosineSimilarity PairwiseDistance GLU GELU ReLU ReLU6 SiLU Mish ELU CELU SELU "
    "Sigmoid Tanh Softplus Softshrink Softsign LeakyReLU LogSigmoid LogSoftmax Hardswish "
    "Hardsigmoid Hardtanh Threshold RReLU LayerNorm GroupNorm LocalResponseNorm SyncBatchNorm "
    "AlphaDropout FeatureAlphaDropout TransformerEncoderLayer TransformerEncoder "
    "TransformerDecoder TransformerDecoderLayer Transformer"
)
_WEIGHTED = _names("Linear Bilinear Embedding EmbeddingBag TransformerEncoderLayer")
_LAYER_FAMILIES = ("Conv", "BatchNorm", "InstanceNorm", "Dropout", "AvgPool", "AdaptiveAvgPool")
_LAYER_PADS = ("ReflectionPad", "ReplicationPad", "ConstantPad", "CircularPad", "LPPool")


def has_weights(name: str) -> bool:
    """Return whether a class of `torch.nn` gives one tensor, on the device of its weights."""
    return name in _WEIGHTED or name.startswith("Conv")


def is_layer(name: str) -> bool:
    """Return whether a class of `torch.nn` gives one tensor for one; losses do too."""
    return name in LAYERS or name.startswith(_LAYER_FAMILIES + _LAYER_PADS) or name.endswith("Loss")


ANNOTATIONS = _names(
    "Tensor LongTensor FloatTensor IntTensor HalfTensor DoubleTensor BFloat16Tensor ByteTensor "
    "Parameter"
)
"""Names of annotations that mean a tensor; `BoolTensor` means a mask."""
JAXTYPING = _names(
    "Float Float16 Float32 Float64 BFloat16 Int Int8 Int16 Int32 Int64 UInt8 Integer Num Shaped "
    "Complex Inexact Real"
)
RESIZING = _names("t_ transpose_ swapaxes_ swapdims_ unsqueeze_ resize_ resize_as_ set_")
"""Methods that change sizes or strides of a tensor in place."""
QUIET = _names("requires_grad_ retain_grad detach_ share_memory_ rename_ squeeze_") | RESIZING
"""Methods named like those in place that do not write a tensor's values."""
