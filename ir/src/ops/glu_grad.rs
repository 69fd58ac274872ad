//! `glu_grad`: gradients of `glu`, `dy, gate, up -> dgate, dup`.
//!
//! With `recompute`, what `glu` made is one more result: the gradient has read all that it is made of.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Amaxes, Factors, GluKind, LocalCx, OpDef, Real, Sample, TypeError, Types, View, ViewMut, arity,
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
    /// Also returns amaxes of results.
    #[serde(default, skip_serializing_if = "is_default")]
    pub amax: Amaxes,
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
        self.amax.infer(res)
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let text = if self.recompute { "*, *, * -> *, *, *" } else { "*, *, * -> *, *" };
        self.amax.factors(Factors::new(text, inputs, self.amax.own(results)))
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let [dy, gate, up] = inputs else { unreachable!("three operands") };
        let (results, amaxes) = self.amax.split(results);
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
        self.amax.reference(results, amaxes);
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        if self.recompute { &[(0, 1), (1, 2), (2, 0)] } else { &[(0, 1), (1, 2)] }
    }

    fn localize(&self, results: &[&[u64]]) -> Option<crate::Op> {
        let amax = self.amax.localize(results)?;
        Some(GluGrad { amax, ..self.clone() }.into())
    }

    fn samples() -> Vec<Sample> {
        let sample = |kind, recompute, amax| {
            Sample::floats(GluGrad { kind, recompute, amax }, &[&[4, 6], &[4, 6], &[4, 6]])
        };
        let plain = |it| GluKind::ALL.map(|kind| sample(kind, it, Amaxes::default()));
        let amaxes = |of: &[usize], pieces| Amaxes { of: of.to_vec(), pieces };
        let swiglu = GluKind::Swiglu;
        [false, true]
            .into_iter()
            .flat_map(plain)
            .chain([
                sample(swiglu, false, amaxes(&[1], vec![])),
                sample(swiglu, false, amaxes(&[0, 1], vec![(1, 2)])),
                sample(swiglu, true, amaxes(&[2, 0, 1], vec![(0, 2)])),
            ])
            .collect()
    }
}
