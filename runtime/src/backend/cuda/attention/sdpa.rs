//! The graphs by which cuDNN knows attention and its gradient.
//!
//! cuDNN finds its kernel by pattern, so operations, their order and types are those that it expects:
//! the ones that PyTorch gives it. Tensors are `[batch, head, position, feature]`; strides say where
//! they really are, so operands may be parts of one buffer, with positions before heads. The kernels
//! take the strides of the statistic too.
//!
//! ```text
//! forward                                   gradient
//! scores = scale q k^T                      p  = exp(scale q k^T - lse), 0 where masked
//! scores = -inf where masked                dv = p^T do
//! lse    = max + log(sum(exp(scores-max)))  ds = scale p (do v^T - rowsum(do o))
//! o      = exp(scores - max) / sum v        dq = ds k      dk = ds^T q
//! ```
//!
//! A query head reads the key-value head of its group by the sizes alone; gradients of a group's heads
//! are added by a reduction over heads.

use cudarc::cudnn::sys::cudnnDataType_t::{
    self, CUDNN_DATA_BFLOAT16, CUDNN_DATA_BOOLEAN, CUDNN_DATA_FLOAT, CUDNN_DATA_INT32,
};
use cudarc::cudnn::sys::cudnnPointwiseMode_t::*;
use cudarc::cudnn::sys::cudnnReduceTensorOp_t::{CUDNN_REDUCE_TENSOR_ADD, CUDNN_REDUCE_TENSOR_MAX};
use kernels::cuda::AttentionShape;

use super::graph::{Cudnn, Failure, Graph, Shape, Tensor};

/// Numbers of the tensors whose addresses a variant pack gives.
pub(super) mod number {
    pub(in super::super) const Q: i64 = 0;
    pub(in super::super) const K: i64 = 1;
    pub(in super::super) const V: i64 = 2;
    pub(in super::super) const O: i64 = 3;
    pub(in super::super) const STATISTIC: i64 = 4;
    pub(in super::super) const DO: i64 = 5;
    pub(in super::super) const DQ: i64 = 6;
    pub(in super::super) const DK: i64 = 7;
    pub(in super::super) const DV: i64 = 8;
    /// Sums over features of `do o`.
    pub(in super::super) const SUMS: i64 = 9;
    /// `dq` in f32, zero before.
    pub(in super::super) const DQ_SUM: i64 = 10;
    /// Values in host memory.
    pub(in super::super) const SCALE: i64 = 11;
    pub(in super::super) const MINUS_INFINITY: i64 = 12;
    pub(in super::super) const ONE: i64 = 13;
}

/// Sizes, and strides in elements of batch, head, position, feature.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Layout {
    pub(super) batch: i64,
    pub(super) heads: i64,
    pub(super) kv_heads: i64,
    pub(super) s: i64,
    pub(super) t: i64,
    pub(super) d: i64,
    pub(super) causal: bool,
    /// Of `q` and `dq`.
    pub(super) q: [i64; 4],
    /// Of `k`, `v`, `dk` and `dv`.
    pub(super) k: [i64; 4],
    /// Of `o` and `do`.
    pub(super) o: [i64; 4],
    /// Of the statistic.
    pub(super) lse: [i64; 4],
}

impl Layout {
    /// Of buffers of their own: `q, o [batch, s, heads d]`, `k, v [batch, t, kv_heads d]`, `lse [batch,
    /// s, heads]`.
    pub(super) fn separate(shape: &AttentionShape) -> Layout {
        let [batch, heads, kv_heads, s, t, d] =
            [shape.batch, shape.heads, shape.kv_heads, shape.s, shape.t, shape.d]
                .map(|it| it as i64);
        let strides = |positions: i64, heads: i64| [positions * heads * d, d, heads * d, 1];
        let (q, k) = (strides(s, heads), strides(t, kv_heads));
        let lse = [s * heads, 1, heads, 1];
        Layout { batch, heads, kv_heads, s, t, d, causal: shape.causal, q, k, o: q, lse }
    }

    fn q(&self) -> Shape {
        let dims = [self.batch, self.heads, self.s, self.d];
        Shape { dtype: CUDNN_DATA_BFLOAT16, dims, strides: self.q }
    }

    fn o(&self) -> Shape {
        Shape { strides: self.o, ..self.q() }
    }

    /// `k` or `v`.
    fn k(&self) -> Shape {
        let dims = [self.batch, self.kv_heads, self.t, self.d];
        Shape { dtype: CUDNN_DATA_BFLOAT16, dims, strides: self.k }
    }

    /// One a score.
    fn scores(&self, dtype: cudnnDataType_t) -> Shape {
        Shape::packed(dtype, [self.batch, self.heads, self.s, self.t])
    }

    /// `ln(sum(exp(scores)))` of each query.
    fn statistic(&self) -> Shape {
        Shape { strides: self.lse, ..self.rows() }
    }

    /// One a query.
    fn rows(&self) -> Shape {
        Shape::packed(CUDNN_DATA_FLOAT, [self.batch, self.heads, self.s, 1])
    }
}

/// `q k v -> o statistic`.
pub(super) fn forward(cudnn: &'static Cudnn, it: &Layout) -> Result<Graph, Failure> {
    let mut g = Graph::new(cudnn);
    let q = g.real(number::Q, it.q())?;
    let k = g.real(number::K, it.k().transposed())?;
    let v = g.real(number::V, it.k())?;
    let o = g.real(number::O, it.o())?;
    let statistic = g.real(number::STATISTIC, it.statistic())?;
    let scale = g.value(number::SCALE)?;
    let (full, rows) = (it.scores(CUDNN_DATA_FLOAT), it.rows());

    let scores = g.matmul(q, k, full)?;
    let scores = g.binary(CUDNN_POINTWISE_MUL, scores, scale, full)?;
    let scores = masked(&mut g, it, scores)?;
    let max = g.reduce(CUDNN_REDUCE_TENSOR_MAX, scores, rows)?;
    let scores = g.binary(CUDNN_POINTWISE_SUB, scores, max, full)?;
    let weights = g.unary(CUDNN_POINTWISE_EXP, scores, full)?;
    let sum = g.reduce(CUDNN_REDUCE_TENSOR_ADD, weights, rows)?;
    let log = g.unary(CUDNN_POINTWISE_LOG, sum, rows)?;
    g.binary(CUDNN_POINTWISE_ADD, max, log, statistic)?;
    let p = g.binary(CUDNN_POINTWISE_DIV, weights, sum, full.of(CUDNN_DATA_BFLOAT16))?;
    g.matmul(p, v, o)?;
    Ok(g)
}

/// `q k v o statistic do -> dq dk dv`, with scratch for sums and `dq`.
pub(super) fn backward(cudnn: &'static Cudnn, it: &Layout) -> Result<Graph, Failure> {
    let mut g = Graph::new(cudnn);
    let q = g.real(number::Q, it.q())?;
    let k = g.real(number::K, it.k().transposed())?;
    let v = g.real(number::V, it.k().transposed())?;
    let o = g.real(number::O, it.o())?;
    let statistic = g.real(number::STATISTIC, it.statistic())?;
    let d_o = g.real(number::DO, it.o())?;
    let dq = g.real(number::DQ, it.q())?;
    let dk = g.real(number::DK, it.k())?;
    let dv = g.real(number::DV, it.k())?;
    let sums = g.real(number::SUMS, it.rows())?;
    let dq_sum = g.real(number::DQ_SUM, Shape::packed(CUDNN_DATA_FLOAT, it.q().dims))?;
    let [scale, one] = [g.value(number::SCALE)?, g.value(number::ONE)?];
    let (full, rows) = (it.scores(CUDNN_DATA_FLOAT), it.rows());
    // Transposed scores: sizes exchanged, and in memory like the scores.
    let across = full.of(CUDNN_DATA_BFLOAT16).transposed();
    let queries = Shape { strides: like_positions_first(it), ..it.q().of(CUDNN_DATA_FLOAT) };
    let keys = Shape::packed(CUDNN_DATA_BFLOAT16, [it.batch, it.heads, it.t, it.d]);
    let kv = Shape::packed(CUDNN_DATA_FLOAT, it.k().dims);

    let dp = g.matmul(d_o, v, full)?;
    let scores = g.matmul(q, k, full)?;
    let products = g.binary(CUDNN_POINTWISE_MUL, d_o, o, queries)?;
    let k = g.reshape(k, kv)?;
    let scores = g.binary(CUDNN_POINTWISE_MUL, scores, scale, full)?;
    let scores = g.binary(CUDNN_POINTWISE_SUB, scores, statistic, full)?;
    let scores = masked(&mut g, it, scores)?;
    let p = g.unary(CUDNN_POINTWISE_EXP, scores, full)?;
    let p_across = g.reshape(p, across)?;
    let dv_heads = g.matmul(p_across, d_o, keys)?;
    let row_sums = g.reduce(CUDNN_REDUCE_TENSOR_ADD, products, rows)?;
    let sums = g.binary(CUDNN_POINTWISE_MUL, row_sums, one, sums)?;
    let ds = g.binary(CUDNN_POINTWISE_SUB, dp, sums, full)?;
    let ds = g.binary(CUDNN_POINTWISE_MUL, ds, p, full)?;
    let ds = g.binary(CUDNN_POINTWISE_MUL, ds, scale, full)?;
    g.matmul(ds, k, dq_sum)?;
    g.unary(CUDNN_POINTWISE_IDENTITY, dq_sum, dq)?;
    let ds_across = g.reshape(ds, across)?;
    let dk_heads = g.matmul(ds_across, q, keys)?;
    g.reduce(CUDNN_REDUCE_TENSOR_ADD, dk_heads, dk)?;
    g.reduce(CUDNN_REDUCE_TENSOR_ADD, dv_heads, dv)?;
    Ok(g)
}

/// The strides that PyTorch's graph has for `do o`, a tensor that is never in memory.
fn like_positions_first(it: &Layout) -> [i64; 4] {
    [it.heads * it.s * it.d, it.s * it.d, it.heads * it.d, 1]
}

/// Minus infinity where the key comes after the query, if causal.
fn masked(g: &mut Graph, it: &Layout, scores: Tensor) -> Result<Tensor, Failure> {
    if !it.causal {
        return Ok(scores);
    }
    let nothing = g.value(number::MINUS_INFINITY)?;
    let positions = it.scores(CUDNN_DATA_INT32);
    let key = g.index(3, scores, positions)?;
    let query = g.index(2, scores, positions)?;
    let seen = g.binary(CUDNN_POINTWISE_CMP_GE, query, key, it.scores(CUDNN_DATA_BOOLEAN))?;
    g.select(seen, scores, nothing, it.scores(CUDNN_DATA_FLOAT))
}
