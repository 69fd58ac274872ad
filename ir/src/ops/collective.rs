//! `collective`: moves the elements of each operand to where its result lives.
//!
//! Operands and results are the parts of one call over the same axes: one all-gather for a whole
//! FSDP unit, say. What moves follows from the shardings of each part; the kind says how a
//! communication library does it. `slice` and `to_partial` are local.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ops::{
    Factors, LocalCx, OpDef, Origin, Real, Sample, StandsFor, TypeError, Types, View, ViewMut,
};
use crate::placement::{AxisSet, ReduceOp, StepKind};
use crate::types::TensorType;

/// See the [module docs](self).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Collective {
    /// How data moves.
    pub kind: CollectiveKind,
    /// The axes of the communicator.
    pub axes: AxisSet,
}

/// How data moves among the ranks that differ on the axes of a [`Collective`] only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CollectiveKind {
    /// Shards of one dimension become whole.
    AllGather,
    /// Partial values become shards of the reduced value.
    ReduceScatter(ReduceOp),
    /// Partial values become the reduced value.
    AllReduce(ReduceOp),
    /// Shards of one dimension become shards of another.
    AllToAll,
    /// Shards change ranks.
    Permute,
    /// A replicated value is cut: local.
    Slice,
    /// A replicated value becomes a partial one: local.
    ToPartial(ReduceOp),
}

/// How a communication library does a step.
impl From<StepKind> for CollectiveKind {
    fn from(step: StepKind) -> CollectiveKind {
        match step {
            StepKind::AllGather { .. } => CollectiveKind::AllGather,
            StepKind::ReduceScatter { op, .. } => CollectiveKind::ReduceScatter(op),
            StepKind::AllReduce { op, .. } => CollectiveKind::AllReduce(op),
            StepKind::AllToAll { .. } => CollectiveKind::AllToAll,
            StepKind::Permute { .. } => CollectiveKind::Permute,
            StepKind::Slice { .. } => CollectiveKind::Slice,
            StepKind::ToPartial { op, .. } => CollectiveKind::ToPartial(op),
        }
    }
}

impl CollectiveKind {
    /// Whether ranks must meet.
    pub fn is_local(self) -> bool {
        match self {
            CollectiveKind::Slice | CollectiveKind::ToPartial(_) => true,
            CollectiveKind::AllGather
            | CollectiveKind::ReduceScatter(_)
            | CollectiveKind::AllReduce(_)
            | CollectiveKind::AllToAll
            | CollectiveKind::Permute => false,
        }
    }

    /// All kinds; those that reduce, with a sum.
    pub const ALL: [CollectiveKind; 7] = [
        CollectiveKind::AllGather,
        CollectiveKind::ReduceScatter(ReduceOp::Sum),
        CollectiveKind::AllReduce(ReduceOp::Sum),
        CollectiveKind::AllToAll,
        CollectiveKind::Permute,
        CollectiveKind::Slice,
        CollectiveKind::ToPartial(ReduceOp::Sum),
    ];

    /// The spelling in text IR, without the reduction.
    pub fn name(self) -> &'static str {
        match self {
            CollectiveKind::AllGather => "all_gather",
            CollectiveKind::ReduceScatter(_) => "reduce_scatter",
            CollectiveKind::AllReduce(_) => "all_reduce",
            CollectiveKind::AllToAll => "all_to_all",
            CollectiveKind::Permute => "permute",
            CollectiveKind::Slice => "slice",
            CollectiveKind::ToPartial(_) => "to_partial",
        }
    }

    /// The reduction, for the kinds that have one.
    pub fn reduce(self) -> Option<ReduceOp> {
        match self {
            CollectiveKind::ReduceScatter(op)
            | CollectiveKind::AllReduce(op)
            | CollectiveKind::ToPartial(op) => Some(op),
            CollectiveKind::AllGather
            | CollectiveKind::AllToAll
            | CollectiveKind::Permute
            | CollectiveKind::Slice => None,
        }
    }

    /// The reduction, for the kinds that reduce what ranks hold.
    pub fn reduces(self) -> Option<ReduceOp> {
        self.reduce().filter(|_| !self.is_local())
    }

    /// The kind with another reduction, if it has one.
    pub fn with_reduce(mut self, with: ReduceOp) -> CollectiveKind {
        if let CollectiveKind::ReduceScatter(op)
        | CollectiveKind::AllReduce(op)
        | CollectiveKind::ToPartial(op) = &mut self
        {
            *op = with;
        }
        self
    }
}

impl fmt::Display for CollectiveKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl OpDef for Collective {
    const ORIGINS: &'static [Origin] = &[Origin::Placement];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        Ok(inputs.iter().map(|&it| it.clone()).collect())
    }

    /// Shardings of parts are unrelated: the verifier checks each part as a step of its own.
    fn factors(&self, _inputs: &[&TensorType], _results: &[&TensorType]) -> Factors {
        unreachable!("collectives exist only where shardings are settled")
    }

    /// On global tensors, a collective changes nothing.
    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        for (input, result) in inputs.iter().zip(results) {
            result.data.copy_from_slice(input.data);
        }
    }

    fn stands_for(&self, _inputs: &[&TensorType]) -> StandsFor {
        // A maximum is of amaxes, or of rows of logits.
        match self.kind == CollectiveKind::AllReduce(ReduceOp::Max) {
            true => StandsFor::Scale,
            false => StandsFor::Itself,
        }
    }

    fn samples() -> Vec<Sample> {
        Vec::new()
    }
}
