//! `attention_grad`: gradients of `attention` in queries, keys and values.
//!
//! ```text
//! p = exp(scale * q k^T - lse)        ds = p * (do v^T - sum(do * o)) * scale
//! dq = ds k                           dk = ds^T q                      dv = p^T do
//! ```
//!
//! `dk` and `dv` are sums over the query heads of a group: where those are sharded (more ranks than
//! key-value heads), they come out partial.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::attention::{Attention, Heads, Query};
use crate::ops::tensor::{axpy, dot};
use crate::ops::{
    Engine, Factors, LocalCx, Number, Numbers, OpDef, Origin, Real, Sample, TypeError, Types, View,
    ViewMut, arity, bytes_of, is_default, same_shape, same_size, single,
};
use crate::types::TensorType;

/// Bytes that a GPU moves in scratch for each element of `q`: the gradient of `q` in f32 is zeroed, added to, and rounded
/// (`docs/gpu.md`: cuDNN's accumulator), and `o` and its gradient are read once more for the row sums of their product.
const SCRATCH: u64 = 4 + 8 + 4 + 2 + 2;

/// See the [module docs](self). Operands: `q`, `k`, `v`, `o`, `lse`, `do`; results: `dq`, `dk`,
/// `dv`. Attributes are those of `attention`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AttentionGrad {
    /// Features of one head.
    pub head_dim: u64,
    /// Queries do not see later keys.
    #[serde(default, skip_serializing_if = "is_default")]
    pub causal: bool,
    /// Factor of the scores; one over the root of `head_dim` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<Number>,
}

impl AttentionGrad {
    /// The op that this is the gradient of.
    pub fn forward(&self) -> Attention {
        Attention { head_dim: self.head_dim, causal: self.causal, scale: self.scale }
    }
}

impl OpDef for AttentionGrad {
    const ORIGINS: &'static [Origin] = &[Origin::Gradient];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 6)?;
        self.forward().check(inputs)?;
        let q = inputs[0];
        same_shape(q, inputs[3])?;
        same_shape(q, inputs[5])?;
        single(inputs, 4)?;
        let n = q.ndim();
        same_size("dims of q and lse", n as u64, inputs[4].ndim() as u64)?;
        for (&a, &b) in q.shape[..n - 1].iter().zip(&inputs[4].shape) {
            same_size("sizes of one dim", a, b)?;
        }
        same_size("query heads", q.shape[n - 1] / self.head_dim, inputs[4].shape[n - 1])?;
        Ok(smallvec![q.clone(), inputs[1].clone(), inputs[2].clone()])
    }

    fn numbers(&self) -> Numbers {
        self.forward().numbers()
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let text = "* s (h g d), * t (h d), * t (h d), * s (h g d), * s (h g), * s (h g d) \
                    -> * s (h g d), * t (h d), * t (h d)";
        let sizes = self.forward().factor_sizes(inputs[0], inputs[1]);
        Factors::with_sizes(text, &sizes, inputs, results).whole("std").even("*hg")
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let [q, k, v, o, lse, dout] = inputs else { unreachable!("six operands") };
        let [dq, dk, dv] = results else { unreachable!("three results") };
        let heads = Heads::new(q.shape, k.shape, self.head_dim);
        let d = heads.d;
        let scale = T::from_f64(self.forward().score_scale());
        dk.data.fill(T::zero());
        dv.data.fill(T::zero());
        for query in heads.queries(self.causal) {
            let Query { index, keys, base, stride } = query;
            let row = &q.data[index * d..][..d];
            let dout = &dout.data[index * d..][..d];
            let dq = &mut dq.data[index * d..][..d];
            let delta = dot(dout, &o.data[index * d..][..d]);
            dq.fill(T::zero());
            for t in 0..keys {
                let at = base + t * stride..base + t * stride + d;
                let key = &k.data[at.clone()];
                let weight = (scale * dot(row, key) - lse.data[index]).exp();
                let dscore = weight * (dot(dout, &v.data[at.clone()]) - delta) * scale;
                axpy(dq, dscore, key);
                axpy(&mut dk.data[at.clone()], dscore, row);
                axpy(&mut dv.data[at], weight, dout);
            }
        }
    }

    /// Five GEMMs (the scores are computed again) where the forward pass has two.
    fn flops(&self, inputs: &[&[u64]], _results: &[&[u64]]) -> u64 {
        self.forward().forward_flops(inputs[0], inputs[1]).saturating_mul(5) / 2
    }

    /// Two GEMMs for each of the forward pass; the scores, which are computed again, do not count.
    fn model_flops(&self, inputs: &[&[u64]], _results: &[&[u64]]) -> u64 {
        Attention::full_flops(inputs[0], inputs[1]).saturating_mul(2)
    }

    fn engine(&self) -> Engine {
        Engine::Attention
    }

    fn bytes(&self, inputs: &[TensorType], results: &[TensorType]) -> u64 {
        bytes_of(inputs) + bytes_of(results) + inputs[0].n_elements() * SCRATCH
    }

    fn samples() -> Vec<Sample> {
        let op = AttentionGrad { head_dim: 3, causal: true, scale: None };
        let full = AttentionGrad { head_dim: 2, causal: false, scale: Some(0.7.into()) };
        let (q, kv, lse): (&[u64], &[u64], &[u64]) = (&[2, 4, 12], &[2, 4, 6], &[2, 4, 4]);
        let (q2, kv2, lse2): (&[u64], &[u64], &[u64]) = (&[2, 3, 8], &[2, 5, 8], &[2, 3, 4]);
        vec![
            Sample::floats(op, &[q, kv, kv, q, lse, q]),
            Sample::floats(full, &[q2, kv2, kv2, q2, lse2, q2]),
        ]
    }
}
