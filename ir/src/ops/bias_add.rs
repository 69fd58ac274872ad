//! `bias_add`: a vector added to every row, `x[* n] + b[n]`.
//!
//! Linear in both operands together, and only so: where `x` is a sum over ranks (the output of a
//! row-parallel layer), either it is reduced first, or the bias is held by one rank of the sum. It
//! is never added once per rank, which is report C28.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Factors, GradCx, GradError, Grads, Linear, LocalCx, OpDef, Real, Sample, StandsFor, SumLeading,
    TypeError, Types, View, ViewMut, arity, ndim, ndim_at_least, same_size,
};
use crate::types::TensorType;

/// See the [module docs](self). Operands: `x`, `b`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BiasAdd {}

impl OpDef for BiasAdd {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 2)?;
        ndim_at_least(inputs, 0, 1, "at least 1 dim")?;
        ndim(inputs, 1, 1, "1 dim")?;
        same_size(
            "features and biases",
            inputs[0].shape[inputs[0].ndim() - 1],
            inputs[1].shape[0],
        )?;
        Ok(smallvec![inputs[0].clone()])
    }

    /// A padded row would become the bias.
    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new("* n, n -> * n", inputs, results).even("*").linear(Linear::Joint)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let (x, b) = (inputs[0], inputs[1]);
        let n = x.last().max(1);
        for (out, row) in results[0].data.chunks_exact_mut(n).zip(x.data.chunks_exact(n)) {
            for (out, (&x, &b)) in out.iter_mut().zip(row.iter().zip(b.data)) {
                *out = x + b;
            }
        }
    }

    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let grad = cx.grad(0);
        let mut res: Grads = smallvec![Some(grad), None];
        if cx.wanted[1] {
            let out = Some(cx.ty(cx.inputs[1]).dtype).filter(|&it| it != cx.ty(grad).dtype);
            res[1] = cx.op(1, SumLeading { out }, &[grad])?;
        }
        Ok(res)
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }

    fn stands_for(&self, _inputs: &[&TensorType]) -> StandsFor {
        StandsFor::Operand
    }

    fn samples() -> Vec<Sample> {
        vec![
            Sample::floats(BiasAdd {}, &[&[2, 4, 6], &[6]]),
            Sample::floats(BiasAdd {}, &[&[4, 5], &[5]]),
        ]
    }
}
