//! `reshard`: the same tensor laid out as its result is pinned; the only place where data moves
//! until `insert-collectives` replaces it.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Cast, Factors, GradCx, GradError, Grads, LocalCx, OpDef, Origin, Real, Sample, TypeError,
    Types, View, ViewMut, arity,
};
use crate::types::{DType, TensorType};

/// See the [module docs](self).
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Reshard {
    /// Element type in which the gradient is reduced; the gradient's own if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reduce: Option<DType>,
}

impl OpDef for Reshard {
    const ORIGINS: &'static [Origin] = &[Origin::Placement];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 1)?;
        Ok(smallvec![inputs[0].clone()])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new("* -> *", inputs, results)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        results[0].data.copy_from_slice(inputs[0].data);
    }

    /// The gradient goes back to where the operand lives, if that is pinned.
    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let mut grad = cx.grad(0);
        let dtype = cx.ty(grad).dtype;
        if let Some(to) = self.reduce.filter(|&it| it != dtype) {
            grad = cx.builder.op(&format!("{}.wide", cx.grad_name(0)), Cast { to }, &[grad])?;
        }
        let operand = cx.inputs[0];
        let data = &cx.builder.graph.values[operand];
        let Some(sharding) = data.sharding.clone().filter(|_| data.pinned) else {
            return Ok(smallvec![Some(grad)]);
        };
        let res = cx.op(0, Reshard::default(), &[grad])?;
        if let Some(res) = res {
            cx.builder.pin(res, sharding);
        }
        Ok(smallvec![res])
    }

    fn samples() -> Vec<Sample> {
        vec![Sample::floats(Reshard::default(), &[&[4, 6]])]
    }
}
