//! `glu`: a gated linear unit, `act(gate) * up`.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    ActivationKind, Amaxes, Codes, Factors, GluGrad, GradCx, GradError, Grads, LocalCx, OpDef,
    Real, Sample, TypeError, Types, Values, View, ViewMut, floats, is_default, same_type,
};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: `gate`, `up`, and the scale of codes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Glu {
    /// The gate's function.
    pub kind: GluKind,
    /// Also returns the amax of the result.
    #[serde(default, skip_serializing_if = "is_default")]
    pub amax: Amaxes,
    /// Gives the result as codes.
    #[serde(default, skip_serializing_if = "is_default")]
    pub codes: Codes,
}

/// Which function the gate goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GluKind {
    /// `silu`.
    Swiglu,
    /// `gelu`, exactly.
    Geglu,
    /// `gelu_tanh`.
    GegluTanh,
    /// `relu`.
    Reglu,
}

impl GluKind {
    /// All of them.
    pub const ALL: [GluKind; 4] =
        [GluKind::Swiglu, GluKind::Geglu, GluKind::GegluTanh, GluKind::Reglu];

    /// The gate's function.
    pub fn activation(self) -> ActivationKind {
        match self {
            GluKind::Swiglu => ActivationKind::Silu,
            GluKind::Geglu => ActivationKind::Gelu,
            GluKind::GegluTanh => ActivationKind::GeluTanh,
            GluKind::Reglu => ActivationKind::Relu,
        }
    }
}

impl Glu {
    /// With one result, in the type of the operands.
    pub fn new(kind: GluKind) -> Glu {
        Glu { kind, amax: Amaxes::default(), codes: Codes::default() }
    }
}

impl OpDef for Glu {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        let inputs = self.codes.check(inputs, 2)?;
        floats(inputs, 0)?;
        same_type(inputs, 1)?;
        self.amax.infer(self.codes.infer(smallvec![inputs[0].clone()])?)
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let own = Factors::new("*, * -> *", self.codes.own(inputs), self.amax.own(results));
        self.amax.factors(self.codes.factors(own))
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let (results, amaxes) = self.amax.split(results);
        let kind = self.kind.activation();
        let operands = inputs[0].data.iter().zip(inputs[1].data);
        for (out, (&gate, &up)) in results[0].data.iter_mut().zip(operands) {
            *out = kind.apply(gate) * up;
        }
        self.amax.reference(results, amaxes);
        self.codes.reference(inputs, results);
    }

    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let (gate, up, grad) = (cx.inputs[0], cx.inputs[1], cx.grad(0));
        let res = cx.ops(&[0, 1], GluGrad::new(self.kind), &[grad, gate, up])?;
        Ok(res.into_iter().map(Some).collect())
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        if self.codes.is_none() { &[(0, 0)] } else { &[] }
    }

    fn localize(&self, results: &[&[u64]]) -> Option<crate::Op> {
        let amax = self.amax.localize(results)?;
        Some(Glu { amax, ..self.clone() }.into())
    }

    fn samples() -> Vec<Sample> {
        let sample = |op: Glu| {
            let shapes: [&[u64]; 3] = [&[4, 6], &[4, 6], &[]];
            let n = 2 + op.codes.of.len();
            let sample = Sample::floats(op, &shapes[..n]);
            if n > 2 { sample.fill(2, Values::Positive) } else { sample }
        };
        let swiglu = Glu::new(GluKind::Swiglu);
        let pieces = [vec![], vec![(0, 2)], vec![(0, 4), (1, 2)]];
        let amaxes = pieces.map(|pieces| Amaxes { of: vec![0], pieces });
        let amaxes = amaxes.map(|amax| Glu { amax, ..swiglu.clone() });
        let codes = |to| Codes { of: [(0, to)].into() };
        let codes = [
            Glu { codes: codes(DType::E5M2), ..swiglu.clone() },
            Glu { codes: codes(DType::E4M3), ..amaxes[0].clone() },
        ];
        let plain = GluKind::ALL.map(Glu::new).into_iter();
        plain.chain(amaxes).chain(codes).map(sample).collect()
    }
}
