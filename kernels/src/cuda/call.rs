//! [`Call`]: an op of a plan, on what the rank holds that holds most.

use ir::ops::{BoundAt, LocalBound};
use ir::plan::{Buffer, Plan};
use ir::{Op, TensorType};
use smallvec::SmallVec;

use super::{OpCall, Operand, batchable};

/// An op of a plan, with what the rank holds of its operands that holds most.
#[derive(Debug, Clone)]
pub struct Call<'a> {
    /// The op.
    pub op: &'a Op,
    /// Its operands.
    pub args: SmallVec<[Operand; 4]>,
    /// Its results.
    pub results: SmallVec<[Operand; 4]>,
    /// One for each of the op's bounds.
    pub bounds: SmallVec<[LocalBound; 2]>,
}

impl<'a> Call<'a> {
    /// The call of an instruction.
    pub fn new(plan: &Plan, op: &'a Op, args: &[Buffer], results: &[Buffer]) -> Call<'a> {
        let operands = |buffers: &[Buffer]| -> SmallVec<[Operand; 4]> {
            buffers.iter().map(|&it| operand(plan, it)).collect()
        };
        let types: SmallVec<[&TensorType; 4]> =
            args.iter().map(|&it| &plan.buffers[it].ty).collect();
        let bound = |at: &BoundAt| {
            let (buffer, dim) = match *at {
                BoundAt::Input(i, dim) => (args[i], dim),
                BoundAt::Result(i, dim) => (results[i], dim),
            };
            let size = plan.buffers[buffer].ty.shape[dim];
            LocalBound { start: 0, extent: plan.local_shape(buffer)[dim], size }
        };
        let bounds = op.bounds(&types).iter().map(bound).collect();
        Call { op, args: operands(args), results: operands(results), bounds }
    }

    /// As [`lower`](super::lower) takes it.
    pub fn as_op_call(&self) -> OpCall<'_> {
        let Call { op, args, results, bounds } = self;
        OpCall { op, args, results, bounds }
    }

    /// Whether both may be in one [`Program`](super::Program).
    pub fn goes_with(&self, other: &Call<'_>) -> bool {
        batchable(&self.as_op_call(), &other.as_op_call())
    }
}

fn operand(plan: &Plan, buffer: Buffer) -> Operand {
    let shape = plan.local_shape(buffer).iter().map(|&it| it as usize).collect();
    Operand { dtype: plan.buffers[buffer].ty.dtype, shape }
}
