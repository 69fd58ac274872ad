//! `glu_grad`: gradients of `glu`, `dy, gate, up -> dgate, dup`.
//!
//! With `recompute`, what `glu` made is one more result: the gradient has read all that it is made of.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Factors, GluKind, LocalCx, OpDef, Real, Sample, TypeError, Types, View, ViewMut, arity,
    is_default, same_shape, same_type,
};
use crate::types::TensorType;

/// See the [module docs](self). Operands: `dy`, `gate`, `up`; results: `dgate`, `dup`, and the result
/// of `glu` if it is computed again, for which all operands are of one type.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GluGrad {
    /// The gate's function.
    pub kind: GluKind,
    /// Returns the result of [`Glu`](crate::ops::Glu), too, possibly in place of `dy`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub recompute: bool,
}

impl OpDef for GluGrad {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 3)?;
        same_shape(inputs[0], inputs[1])?;
        same_shape(inputs[0], inputs[2])?;
        let mut res: Types = smallvec![inputs[1].clone(), inputs[2].clone()];
        if self.recompute {
            same_type(inputs, 1)?;
            same_type(inputs, 2)?;
            res.push(inputs[1].clone());
        }
        Ok(res)
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let text = if self.recompute { "*, *, * -> *, *, *" } else { "*, *, * -> *, *" };
        Factors::new(text, inputs, results)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let [dy, gate, up] = inputs else { unreachable!("three operands") };
        let (grads, again) = results.split_at_mut(2);
        let [dgate, dup] = grads else { unreachable!("two gradients") };
        let kind = self.kind.activation();
        let outs = dgate.data.iter_mut().zip(dup.data.iter_mut());
        let operands = dy.data.iter().zip(gate.data).zip(up.data);
        for ((dgate, dup), ((&dy, &gate), &up)) in outs.zip(operands) {
            *dgate = dy * up * kind.slope(gate);
            *dup = dy * kind.apply(gate);
        }
        if let Some(y) = again.first_mut() {
            for (y, (&gate, &up)) in y.data.iter_mut().zip(gate.data.iter().zip(up.data)) {
                *y = kind.apply(gate) * up;
            }
        }
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        if self.recompute { &[(0, 1), (1, 2), (2, 0)] } else { &[(0, 1), (1, 2)] }
    }

    fn samples() -> Vec<Sample> {
        let sample = |recompute| {
            move |kind| Sample::floats(GluGrad { kind, recompute }, &[&[4, 5], &[4, 5], &[4, 5]])
        };
        [false, true].into_iter().flat_map(|it| GluKind::ALL.map(sample(it))).collect()
    }
}
