//! `activation_grad`: a gradient times the slope of an activation, `dy, x -> dx`.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    ActivationKind, Amaxes, Codes, Factors, LocalCx, OpDef, Origin, Real, Sample, Sums, TypeError,
    Types, Values, View, ViewMut, is_default, same_shape,
};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: `dy`, `x`, and the scale of codes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ActivationGrad {
    /// The function.
    pub kind: ActivationKind,
    /// Also returns the amax of the result.
    #[serde(default, skip_serializing_if = "is_default")]
    pub amax: Amaxes,
    /// Gives the result as codes.
    #[serde(default, skip_serializing_if = "is_default")]
    pub codes: Codes,
    /// Also returns the sum of the result.
    #[serde(default, skip_serializing_if = "is_default")]
    pub sums: Sums,
}

impl ActivationGrad {
    /// With one result, in the type of `x`.
    pub fn new(kind: ActivationKind) -> ActivationGrad {
        let (amax, codes, sums) = Default::default();
        ActivationGrad { kind, amax, codes, sums }
    }
}

impl OpDef for ActivationGrad {
    const ORIGINS: &'static [Origin] = &[Origin::Gradient];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        let inputs = self.codes.check(inputs, 2)?;
        same_shape(inputs[0], inputs[1])?;
        let own = self.codes.infer(smallvec![inputs[1].clone()])?;
        self.sums.infer(inputs, 1, self.amax.infer(own)?)
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let own = self.amax.own(self.sums.before(results));
        let own = Factors::new("*, * -> *", self.codes.own(inputs), own);
        self.sums.factors(self.amax.factors(self.codes.factors(own)))
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let (results, sums) = self.sums.split(results);
        let (results, amaxes) = self.amax.split(results);
        let operands = inputs[0].data.iter().zip(inputs[1].data);
        for (out, (&dy, &x)) in results[0].data.iter_mut().zip(operands) {
            *out = dy * self.kind.slope(x);
        }
        self.amax.reference(results, amaxes);
        self.sums.reference(results, sums);
        self.codes.reference(inputs, results);
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        if self.codes.is_none() { &[(0, 0)] } else { &[] }
    }

    fn localize(&self, results: &[&[u64]]) -> Option<crate::Op> {
        let amax = self.amax.localize(self.sums.before(results))?;
        Some(ActivationGrad { amax, ..self.clone() }.into())
    }

    fn samples() -> Vec<Sample> {
        let sample = |op: ActivationGrad| {
            let shapes: [&[u64]; 3] = [&[4, 5], &[4, 5], &[]];
            let n = 2 + op.codes.of.len();
            let sample = Sample::floats(op, &shapes[..n]);
            if n > 2 { sample.fill(2, Values::Positive) } else { sample }
        };
        let plain = ActivationGrad::new(ActivationKind::Gelu);
        let amaxes = |pieces| Amaxes { of: vec![0], pieces };
        let codes = Codes { of: [(0, DType::E4M3)].into() };
        let sums = Sums { of: [(0, DType::F32)].into() };
        let fused = [
            ActivationGrad { amax: amaxes(vec![(0, 2)]), ..plain.clone() },
            ActivationGrad { codes: codes.clone(), ..plain.clone() },
            ActivationGrad { amax: amaxes(vec![]), codes: codes.clone(), ..plain.clone() },
            ActivationGrad { amax: amaxes(vec![(0, 2)]), sums: sums.clone(), ..plain.clone() },
            ActivationGrad { amax: amaxes(vec![]), codes, sums, ..plain },
        ];
        ActivationKind::ALL.map(ActivationGrad::new).into_iter().chain(fused).map(sample).collect()
    }
}
