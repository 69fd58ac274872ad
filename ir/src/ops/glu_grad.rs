//! `glu_grad`: gradients of `glu`, `dy, gate, up -> dgate, dup`.
//!
//! With `recompute`, what `glu` made is one more result: the gradient has read all that it is made of.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Amaxes, Codes, Factors, GluKind, LocalCx, OpDef, Origin, Real, Sample, Sums, TypeError, Types,
    Values, View, ViewMut, is_default, same_shape, same_type,
};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: `dy`, `gate`, `up`; results: `dgate`, `dup`, and the result
/// of `glu` if it is computed again, for which all operands are of one type. Scales of codes follow the operands.
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
    /// Gives results as codes.
    #[serde(default, skip_serializing_if = "is_default")]
    pub codes: Codes,
    /// Also returns sums of results.
    #[serde(default, skip_serializing_if = "is_default")]
    pub sums: Sums,
}

impl GluGrad {
    /// The gradients and nothing else, in the types of the operands.
    pub fn new(kind: GluKind) -> GluGrad {
        let (amax, codes, sums) = Default::default();
        GluGrad { kind, recompute: false, amax, codes, sums }
    }
}

impl OpDef for GluGrad {
    const ORIGINS: &'static [Origin] = &[Origin::Gradient];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        let inputs = self.codes.check(inputs, 3)?;
        same_shape(inputs[0], inputs[1])?;
        same_shape(inputs[0], inputs[2])?;
        let mut res: Types = smallvec![inputs[1].clone(), inputs[2].clone()];
        if self.recompute {
            same_type(inputs, 1)?;
            same_type(inputs, 2)?;
            res.push(inputs[1].clone());
        }
        self.sums.infer(inputs, res.len(), self.amax.infer(self.codes.infer(res)?)?)
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let text = if self.recompute { "*, *, * -> *, *, *" } else { "*, *, * -> *, *" };
        let own = self.amax.own(self.sums.before(results));
        let own = Factors::new(text, self.codes.own(inputs), own);
        self.sums.factors(self.amax.factors(self.codes.factors(own)))
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let [dy, gate, up] = self.codes.own(inputs) else { unreachable!("three operands") };
        let (results, sums) = self.sums.split(results);
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
        self.sums.reference(results, sums);
        self.codes.reference(inputs, results);
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        match (self.codes.is_none(), self.recompute) {
            (true, true) => &[(0, 1), (1, 2), (2, 0)],
            (true, false) => &[(0, 1), (1, 2)],
            // Codes are smaller than any operand.
            (false, _) => &[],
        }
    }

    fn localize(&self, results: &[&[u64]]) -> Option<crate::Op> {
        let amax = self.amax.localize(self.sums.before(results))?;
        Some(GluGrad { amax, ..self.clone() }.into())
    }

    fn samples() -> Vec<Sample> {
        let sample = |op: GluGrad| {
            let shapes: [&[u64]; 6] = [&[4, 6], &[4, 6], &[4, 6], &[], &[], &[]];
            let n = 3 + op.codes.of.len();
            let sample = Sample::floats(op, &shapes[..n]);
            (3..n).fold(sample, |sample, it| sample.fill(it, Values::Positive))
        };
        let plain =
            |recompute| GluKind::ALL.map(|kind| GluGrad { recompute, ..GluGrad::new(kind) });
        let amaxes = |of: &[usize], pieces| Amaxes { of: of.to_vec(), pieces };
        let swiglu = |recompute, amax| GluGrad { recompute, amax, ..GluGrad::new(GluKind::Swiglu) };
        let codes = |of: &[(usize, DType)]| Codes { of: of.into() };
        let (e4m3, e5m2) = (DType::E4M3, DType::E5M2);
        let sums = |of: &[usize]| Sums { of: of.iter().map(|&it| (it, DType::F32)).collect() };
        let fused = [
            swiglu(false, amaxes(&[1], vec![])),
            swiglu(false, amaxes(&[0, 1], vec![(1, 2)])),
            swiglu(true, amaxes(&[2, 0, 1], vec![(0, 2)])),
            GluGrad { codes: codes(&[(1, e5m2)]), ..swiglu(false, amaxes(&[1], vec![])) },
            GluGrad {
                codes: codes(&[(1, e5m2), (0, e5m2)]),
                ..swiglu(false, amaxes(&[1, 0], vec![]))
            },
            GluGrad {
                codes: codes(&[(2, e4m3), (0, e4m3), (1, e5m2)]),
                ..swiglu(true, amaxes(&[0, 1], vec![]))
            },
            GluGrad { sums: sums(&[0, 1]), ..swiglu(true, amaxes(&[0, 1], vec![(1, 2)])) },
            GluGrad {
                codes: codes(&[(1, e5m2), (0, e5m2)]),
                sums: sums(&[1, 0]),
                ..swiglu(false, amaxes(&[0, 1], vec![]))
            },
            GluGrad {
                codes: codes(&[(1, e5m2)]),
                sums: sums(&[1]),
                ..swiglu(true, amaxes(&[1], vec![]))
            },
        ];
        [false, true].into_iter().flat_map(plain).chain(fused).map(sample).collect()
    }
}
