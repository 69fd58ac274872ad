//! `attention`: scaled dot-product attention with grouped queries.
//!
//! ```text
//! q[* s (h g d)]  k[* t (h d)]  v[* t (h d)]  ->  o[* s (h g d)]  lse[* s (h g)]
//! o = softmax(scale * q k^T) v       lse = ln(sum(exp(scale * q k^T)))
//! ```
//!
//! Head `j` of `h` key-value heads serves the query heads `j g .. (j + 1) g`. A causal query sees
//! the keys up to its own position. Heads may be sharded on either factor; sequences are whole.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::tensor::{axpy, dot};
use crate::ops::{
    AttentionGrad, Engine, Factors, GradCx, GradError, Grads, LocalCx, Number, Numbers, OpDef,
    Real, Sample, TypeError, Types, View, ViewMut, arity, floats, is_default, ndim, ndim_at_least,
    same_shape, same_size,
};
use crate::range::{Ranged, RealRange};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: `q`, `k`, `v`; results: `o`, `lse` (f32).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Attention {
    /// Features of one head.
    pub head_dim: u64,
    /// Queries do not see later keys.
    #[serde(default, skip_serializing_if = "is_default")]
    pub causal: bool,
    /// Factor of the scores; one over the root of `head_dim` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<Number>,
}

/// Sizes of one attention, of global or local operands.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    /// Sequences.
    pub batch: usize,
    /// Queries of a sequence.
    pub s: usize,
    /// Keys of a sequence.
    pub t: usize,
    /// Key-value heads.
    pub h: usize,
    /// Query heads of a key-value head.
    pub g: usize,
    /// Features of a head.
    pub d: usize,
}

impl Heads {
    pub(crate) fn new(q: &[usize], k: &[usize], head_dim: u64) -> Heads {
        let (n, d) = (q.len(), head_dim as usize);
        let h = k[n - 1] / d;
        let g = if h == 0 { 0 } else { q[n - 1] / (h * d) };
        Heads { batch: q[..n - 2].iter().product(), s: q[n - 2], t: k[n - 2], h, g, d }
    }

    /// Every (sequence, query, query head), with the number of keys that it sees.
    pub(crate) fn queries(self, causal: bool) -> impl Iterator<Item = Query> {
        let heads = self.h * self.g;
        (0..self.batch * self.s * heads).map(move |index| {
            let (row, head) = (index / heads, index % heads);
            let (sequence, position) = (row / self.s, row % self.s);
            let keys = if causal { self.t.min(position + 1) } else { self.t };
            // Row `t` of `k` and `v` for this query starts at `base + t * stride`.
            let base = (sequence * self.t * self.h + head / self.g) * self.d;
            Query { index, keys, base, stride: self.h * self.d }
        })
    }
}

/// One query head at one position.
pub(crate) struct Query {
    /// Its number: its features in `q` start at `index * d`.
    pub index: usize,
    /// How many keys it sees.
    pub keys: usize,
    /// Where its first key starts in `k` and `v`.
    pub base: usize,
    /// From one key to the next.
    pub stride: usize,
}

impl Attention {
    /// Range of the factor of the scores.
    pub const SCALE: RealRange = RealRange::Positive;

    /// Factor of the scores.
    pub fn score_scale(&self) -> f64 {
        self.scale.map_or(1.0 / (self.head_dim as f64).sqrt(), |it| it.0)
    }

    /// Sizes of the factors that share a dimension.
    pub(crate) fn factor_sizes(&self, q: &TensorType, k: &TensorType) -> [(char, u64); 3] {
        let last = |it: &TensorType| it.shape[it.ndim() - 1];
        [('d', self.head_dim), ('h', last(k) / self.head_dim), ('g', last(q) / last(k).max(1))]
    }

    /// Checks `q`, `k` and `v`.
    pub(crate) fn check(&self, inputs: &[&TensorType]) -> Result<(), TypeError> {
        let (q, k, v) = (inputs[0], inputs[1], inputs[2]);
        (0..3).try_for_each(|it| floats(inputs, it))?;
        ndim_at_least(inputs, 0, 2, "at least 2 dims")?;
        ndim(inputs, 1, q.ndim(), "as many dims as the queries")?;
        same_shape(k, v)?;
        let n = q.ndim();
        for (&a, &b) in q.shape[..n - 2].iter().zip(&k.shape) {
            same_size("numbers of sequences", a, b)?;
        }
        if self.causal {
            same_size("queries and keys of causal attention", q.shape[n - 2], k.shape[n - 2])?;
        }
        if self.head_dim == 0 || k.shape[n - 1] == 0 {
            return Err(TypeError::Attribute { why: "head_dim and key-value heads must not be 0" });
        }
        let (kv, head_dim) = (k.shape[n - 1], self.head_dim);
        if !kv.is_multiple_of(head_dim) {
            return Err(TypeError::Multiple { what: "features of keys", size: kv, of: head_dim });
        }
        match q.shape[n - 1].is_multiple_of(kv) {
            true => Ok(()),
            false => Err(TypeError::Multiple {
                what: "features of queries",
                size: q.shape[n - 1],
                of: kv,
            }),
        }
    }

    /// Operations of the forward pass: two GEMMs, halved if causal.
    pub(crate) fn forward_flops(&self, q: &[u64], k: &[u64]) -> u64 {
        let full = Attention::full_flops(q, k);
        if self.causal { full / 2 } else { full }
    }

    /// Operations of the forward pass if every query sees every key.
    pub(crate) fn full_flops(q: &[u64], k: &[u64]) -> u64 {
        (4 * q.iter().product::<u64>()).saturating_mul(k[k.len() - 2])
    }
}

impl OpDef for Attention {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 3)?;
        self.check(inputs)?;
        let q = inputs[0];
        let mut shape = q.shape.clone();
        shape[q.ndim() - 1] /= self.head_dim;
        Ok(smallvec![q.clone(), TensorType { dtype: DType::F32, shape }])
    }

    fn numbers(&self) -> Numbers {
        self.scale.iter().map(|&it| Ranged::new("scale", it, Attention::SCALE)).collect()
    }

    /// The `lse` of a padded sequence would not be zero.
    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let text = "* s (h g d), * t (h d), * t (h d) -> * s (h g d), * s (h g)";
        Factors::with_sizes(text, &self.factor_sizes(inputs[0], inputs[1]), inputs, results)
            .whole("std")
            .even("*hg")
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let [q, k, v] = inputs else { unreachable!("three operands") };
        let [o, lse] = results else { unreachable!("two results") };
        let heads = Heads::new(q.shape, k.shape, self.head_dim);
        let d = heads.d;
        let scale = T::from_f64(self.score_scale());
        let mut scores = vec![T::zero(); heads.t];
        for query in heads.queries(self.causal) {
            let Query { index, keys, base, stride } = query;
            let row = &q.data[index * d..][..d];
            let out = &mut o.data[index * d..][..d];
            let scores = &mut scores[..keys];
            let mut max = T::neg_infinity();
            for (t, score) in scores.iter_mut().enumerate() {
                *score = scale * dot(row, &k.data[base + t * stride..][..d]);
                max = max.max(*score);
            }
            let mut sum = T::zero();
            out.fill(T::zero());
            for (t, &score) in scores.iter().enumerate() {
                let weight = (score - max).exp();
                sum += weight;
                axpy(out, weight, &v.data[base + t * stride..][..d]);
            }
            out.iter_mut().for_each(|it| *it /= sum);
            lse.data[index] = max + sum.ln();
        }
    }

    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let dout = cx.grad(0);
        let (q, k, v) = (cx.inputs[0], cx.inputs[1], cx.inputs[2]);
        let (o, lse) = (cx.results[0], cx.results[1]);
        let op = AttentionGrad { head_dim: self.head_dim, causal: self.causal, scale: self.scale };
        let res = cx.ops(&[0, 1, 2], op, &[q, k, v, o, lse, dout])?;
        Ok(res.into_iter().map(Some).collect())
    }

    /// Two GEMMs of `2 s t d` per query head; half of that if causal, as in Flash attention's and
    /// Megatron's counts.
    fn flops(&self, inputs: &[&[u64]], _results: &[&[u64]]) -> u64 {
        self.forward_flops(inputs[0], inputs[1])
    }

    fn model_flops(&self, inputs: &[&[u64]], _results: &[&[u64]]) -> u64 {
        Attention::full_flops(inputs[0], inputs[1])
    }

    fn by_products(&self) -> &'static [usize] {
        &[1]
    }

    fn engine(&self) -> Engine {
        Engine::Attention
    }

    fn samples() -> Vec<Sample> {
        let op = Attention { head_dim: 3, causal: true, scale: None };
        let full = Attention { head_dim: 2, causal: false, scale: Some(0.7.into()) };
        vec![
            Sample::floats(op, &[&[2, 4, 12], &[2, 4, 6], &[2, 4, 6]]),
            Sample::floats(full.clone(), &[&[2, 3, 8], &[2, 5, 8], &[2, 5, 8]]),
            Sample::floats(full, &[&[3, 12], &[4, 6], &[4, 6]]),
        ]
    }
}
