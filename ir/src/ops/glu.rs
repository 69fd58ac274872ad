//! `glu`: a gated linear unit, `act(gate) * up`.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    ActivationKind, Factors, GluGrad, GradCx, GradError, Grads, LocalCx, OpDef, Real, Sample,
    TypeError, Types, View, ViewMut, arity, floats, same_type,
};
use crate::types::TensorType;

/// See the [module docs](self). Operands: `gate`, `up`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Glu {
    /// The gate's function.
    pub kind: GluKind,
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
    /// That of a kind.
    pub fn new(kind: GluKind) -> Glu {
        Glu { kind }
    }
}

impl OpDef for Glu {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 2)?;
        floats(inputs, 0)?;
        same_type(inputs, 1)?;
        Ok(smallvec![inputs[0].clone()])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new("*, * -> *", inputs, results)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let kind = self.kind.activation();
        let operands = inputs[0].data.iter().zip(inputs[1].data);
        for (out, (&gate, &up)) in results[0].data.iter_mut().zip(operands) {
            *out = kind.apply(gate) * up;
        }
    }

    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let (gate, up, grad) = (cx.inputs[0], cx.inputs[1], cx.grad(0));
        let res = cx.ops(&[0, 1], GluGrad::new(self.kind), &[grad, gate, up])?;
        Ok(res.into_iter().map(Some).collect())
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }

    fn is_map(&self) -> bool {
        true
    }

    fn samples() -> Vec<Sample> {
        let sample = |kind| Sample::floats(Glu::new(kind), &[&[4, 6], &[4, 6]]);
        GluKind::ALL.map(sample).to_vec()
    }
}
