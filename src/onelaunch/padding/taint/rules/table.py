"""The table of propagation rules. An operation without one taints all from any element."""

from __future__ import annotations

from onelaunch.driver.aten import Operator, is_pointwise
from onelaunch.padding.taint.rules import (
    elementwise,
    layers,
    places,
    products,
    reduction,
    rows,
    windows,
)
from onelaunch.padding.taint.rules.call import Rule, rerun
from onelaunch.padding.taint.trace import kind_of, packet_of


def rule_of(op: Operator) -> Rule | None:
    name, packet = kind_of(op.label), packet_of(op.label)
    plain = packet.removesuffix("_")
    found = RULES.get(name) or RULES.get(packet) or RULES.get(plain)
    if found is None and (is_pointwise(op.func) or plain in elementwise.POINTWISE):
        return None if packet.startswith("_foreach") else elementwise.pointwise
    return found


def _table(*rows: tuple[str, Rule]) -> dict[str, Rule]:
    return {name: rule for names, rule in rows for name in names.split()}


RULES: dict[str, Rule] = _table(
    ("cumsum cumprod cummax cummin logcumsumexp native_layer_norm _fused_rms_norm", rerun),
    ("native_group_norm addr _trilinear linalg_cross constant_pad_nd im2col col2im", rerun),
    ("max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d", rerun),
    ("cat stack flip repeat tril triu select_scatter slice_scatter diagonal_scatter", rerun),
    ("diag_embed rot90 pixel_shuffle pixel_unshuffle channel_shuffle", rerun),
    ("reflection_pad1d reflection_pad2d reflection_pad3d", rerun),
    ("replication_pad1d replication_pad2d replication_pad3d", rerun),
    ("copy copy_ fill.Tensor fill_.Tensor", rerun),
    ("repeat_interleave.self_int _unsafe_view _reshape_alias _reshape_copy", rerun),
    ("view_copy expand_copy permute_copy slice_copy select_copy unfold_copy", rerun),
    ("fill fill_ zero zero_ zeros_like ones_like full_like new_zeros", elementwise.filled),
    ("new_ones new_full new_empty new_empty_strided empty_like", elementwise.filled),
    ("mul.Tensor mul_.Tensor", elementwise.product),
    ("where.self masked_fill masked_fill_", elementwise.chosen),
    ("complex polar", elementwise.pointwise),
    ("eq.Tensor ne.Tensor eq_.Tensor ne_.Tensor", rows.compared),
    ("glu", elementwise.halved),
    ("bucketize.Tensor isin.Tensor_Tensor isin.Tensor_Scalar", elementwise.by_element),
    ("searchsorted.Tensor", elementwise.searched),
    ("fake_quantize_per_tensor_affine_cachemask", elementwise.by_element),
    ("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", elementwise.by_element),
    ("fake_quantize_per_channel_affine_cachemask", elementwise.by_element),
    ("mse_loss smooth_l1_loss huber_loss soft_margin_loss", elementwise.loss),
    ("binary_cross_entropy binary_cross_entropy_with_logits", elementwise.loss),
    ("nll_loss_forward nll_loss2d_forward", elementwise.negative_log_likelihood),
    ("sum count_nonzero", reduction.summed),
    ("norm linalg_vector_norm", reduction.measured),
    ("mean", reduction.averaged_over),
    ("amax max.dim max logsumexp", reduction.largest),
    ("amin min.dim min prod any all argmax argmin var std", reduction.reduced),
    ("var_mean std_mean sort topk", reduction.reduced),
    ("argsort kthvalue median nanmedian mode nansum aminmax", reduction.reduced),
    ("_softmax _safe_softmax", reduction.softmax),
    ("_log_softmax", reduction.log_softmax),
    ("native_batch_norm _native_batch_norm_legit cudnn_batch_norm", reduction.batch_norm),
    ("_native_batch_norm_legit_no_training _batch_norm_with_update", reduction.batch_norm),
    ("_batch_norm_no_update miopen_batch_norm", reduction.batch_norm),
    ("renorm", reduction.renormed),
    ("mm bmm dot vdot mv _int_mm", products.matmul),
    ("addmm baddbmm addmv _addmm_activation", products.matmul_added),
    ("linear _weight_int8pack_mm _weight_int4pack_mm", products.linear),
    ("_scaled_mm", products.scaled_matmul),
    ("embedding", products.embedded),
    ("_embedding_bag _embedding_bag_forward_only", products.bagged),
    ("_cdist_forward _euclidean_dist", products.distances),
    ("linalg_inv_ex _linalg_det _linalg_slogdet linalg_cholesky_ex", products.each_matrix),
    ("linalg_matrix_exp _linalg_solve_ex linalg_solve_triangular", products.each_matrix),
    ("_linalg_eigh _linalg_svd", products.values_of_each_matrix),
    ("_fft_r2c _fft_c2r _fft_c2c", products.transformed),
    ("convolution", windows.convolution),
    ("adaptive_max_pool2d adaptive_max_pool3d", windows.rerun_alike),
    ("_adaptive_avg_pool2d _adaptive_avg_pool3d", windows.rerun_alike),
    ("upsample_nearest1d upsample_nearest2d upsample_nearest3d", windows.resampled),
    ("_upsample_nearest_exact1d _upsample_nearest_exact2d", windows.resampled),
    ("_upsample_nearest_exact3d", windows.resampled),
    ("upsample_linear1d upsample_bilinear2d upsample_trilinear3d", windows.resampled),
    ("upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa", windows.rerun_alike),
    ("grid_sampler_2d grid_sampler_3d cudnn_grid_sampler", windows.sampled),
    ("affine_grid_generator", windows.gridded),
    ("roll", places.rolled),
    ("index_select", places.index_select),
    ("gather", places.gather),
    ("index.Tensor _unsafe_index", places.indexed),
    ("index_put index_put_ _unsafe_index_put", places.index_put),
    ("index_add index_add_ index_copy index_copy_", places.put_along),
    ("index_fill index_fill_ index_reduce index_reduce_", places.put_along),
    ("scatter.src scatter.value scatter_.src scatter_.value", places.scattered),
    ("scatter_add scatter_add_ scatter_reduce scatter_reduce_", places.scattered),
    ("attention", layers.attention),
    ("_transformer_encoder_layer_fwd _native_multi_head_attention", layers.fused_attention),
    ("_cudnn_rnn mkldnn_rnn_layer", layers.recurrent),
    ("_thnn_fused_lstm_cell _thnn_fused_gru_cell", layers.cell),
)
"""Operation -> rule; by overload, by name, or by name without the underscore of in-place."""
