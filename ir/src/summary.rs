//! `Summary`: what a plan costs, counted from the plan alone.

mod work;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Serialize, Serializer};

use crate::amax::{ScalingKind, scaled_gemms};
use crate::graph::Name;
use crate::ops::CollectiveKind;
use crate::placement::AxisSet;
use crate::plan::{Instruction, Part, Plan, PlanSection};
use crate::quant::Role;

pub use work::Repeated;
pub(crate) use work::{executed_flops, model_flops, op_flops};

/// See the [module docs](self). Bytes and operations are those of one rank and one step, all
/// micro-batches included.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Elements of all parameters, each once.
    pub parameters: u64,
    /// Floating point operations of GEMMs and attention that a rank executes; a multiply-add counts two.
    pub flops: u64,
    /// Operations that training needs, of one step over *all* ranks, as model FLOPs utilization (MFU) counts them:
    /// fprop, dgrad and wgrad of each token once, nothing computed again, nothing that several ranks do alike twice,
    /// causal attention not halved. With every weight trained and one sequence of `s` tokens `6 N s + 12 l h s^2`
    /// with `N` weights in matrix products (PaLM, appendix B; torchtitan).
    #[serde(serialize_with = "json_number")]
    pub model_flops: u128,
    /// The part of [`Summary::flops`] that several ranks do alike, by axes, most first.
    pub repeated: Vec<Repeated>,
    /// Bytes that survive a step: weights, optimizer states, inputs.
    pub persistent_bytes: u64,
    /// Bytes of temporaries at their peak.
    pub step_bytes: u64,
    /// Collectives by axes and kind.
    pub collectives: Vec<CollectiveTotal>,
    /// Weights whose scale is that of the tensor, by amax group.
    pub amax_groups: Vec<AmaxTotal>,
}

/// Collectives of one kind over one set of axes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CollectiveTotal {
    /// Names of the axes, as in `dp, tp`.
    pub axes: String,
    /// `all_gather`, `reduce_scatter`, ...
    pub kind: &'static str,
    /// Calls.
    pub count: u64,
    /// All-gather counts its output, the others their input.
    pub bytes: u64,
    /// Bytes that a rank sends in a ring of g ranks, padding included: all-gather and reduce-scatter g-1
    /// pieces of a rank, which is (g-1)/g of `bytes` where they are equal, all-reduce twice (g-1)/g,
    /// all-to-all (g-1)/g.
    pub wire_bytes: u64,
}

/// Weights whose amax is reduced over one set of axes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AmaxTotal {
    /// Names of the axes; empty for weights of which every rank has the amax.
    pub axes: String,
    /// Number of weights.
    pub weights: u64,
}

impl Summary {
    /// Counts.
    pub fn of(plan: &Plan) -> Summary {
        let mut totals: BTreeMap<(AxisSet, CollectiveKind), [u64; 3]> = BTreeMap::new();
        for section in PlanSection::ALL {
            let times = u64::from(plan.runs(section));
            for instruction in plan.section(section) {
                match instruction {
                    Instruction::Collective { kind, comm, parts, .. } if !kind.is_local() => {
                        let axes = plan.comms[*comm];
                        let (bytes, wire_bytes) = traffic(plan, *kind, axes, parts);
                        let total = totals.entry((axes, *kind)).or_default();
                        for (total, once) in total.iter_mut().zip([1, bytes, wire_bytes]) {
                            *total = times.saturating_mul(once).saturating_add(*total);
                        }
                    }
                    Instruction::Compute { .. }
                    | Instruction::Collective { .. }
                    | Instruction::Copy { .. }
                    | Instruction::Record { .. }
                    | Instruction::Wait { .. } => (),
                }
            }
        }
        let collectives = totals.into_iter().map(|((axes, kind), [count, bytes, wire_bytes])| {
            let axes = plan.mesh.names(axes);
            CollectiveTotal { axes, kind: kind.name(), count, bytes, wire_bytes }
        });
        Summary {
            parameters: plan.params.iter().map(|it| plan.buffers[it.buffer].ty.n_elements()).sum(),
            flops: executed_flops(plan),
            model_flops: model_flops(plan),
            repeated: work::repeated(plan),
            persistent_bytes: plan.persistent_bytes,
            step_bytes: plan.step_bytes,
            collectives: collectives.collect(),
            amax_groups: amax_groups(plan),
        }
    }

    /// [`Summary::model_flops`] as the share of one of `ranks` ranks.
    pub fn model_flops_of_rank(&self, ranks: u64) -> f64 {
        self.model_flops as f64 / ranks as f64
    }

    /// Bytes that one rank sends in a step.
    pub fn wire_bytes(&self) -> u64 {
        self.collectives.iter().map(|it| it.wire_bytes).sum()
    }
}

/// Writes a count as JSON can: as an integer if it has 64 bits at most, else as the nearest float.
fn json_number<S: Serializer>(n: &u128, serializer: S) -> Result<S::Ok, S::Error> {
    match u64::try_from(*n) {
        Ok(n) => serializer.serialize_u64(n),
        Err(_) => serializer.serialize_f64(*n as f64),
    }
}

/// Bytes of one collective, and how many of them one rank sends: see [`CollectiveTotal`].
pub fn traffic(plan: &Plan, kind: CollectiveKind, axes: AxisSet, parts: &[Part]) -> (u64, u64) {
    let group = plan.mesh.set_size(axes);
    let others = |it: u64| (u128::from(it) * u128::from(group - 1) / u128::from(group)) as u64;
    let of = |it: &Part| {
        let (src, dst) = (plan.local_bytes(it.src), plan.local_bytes(it.dst));
        match kind {
            CollectiveKind::AllGather => (dst, src.saturating_mul(group - 1)),
            CollectiveKind::ReduceScatter(_) => (src, dst.saturating_mul(group - 1)),
            CollectiveKind::AllReduce(_) => (src, others(src).saturating_mul(2)),
            CollectiveKind::AllToAll => (src, others(src)),
            CollectiveKind::Permute => (src, src),
            CollectiveKind::Slice | CollectiveKind::ToPartial(_) => (src, 0),
        }
    };
    parts.iter().map(of).fold((0_u64, 0_u64), |(bytes, sent), it| {
        (bytes.saturating_add(it.0), sent.saturating_add(it.1))
    })
}

fn amax_groups(plan: &Plan) -> Vec<AmaxTotal> {
    let mut weights: BTreeSet<(AxisSet, Name)> = BTreeSet::new();
    for operand in scaled_gemms(plan).into_iter().flat_map(|it| it.operands) {
        if operand.role == Role::Weight && operand.scaling != ScalingKind::Block {
            weights.insert((operand.group, operand.tensor));
        }
    }
    let mut totals: BTreeMap<AxisSet, u64> = BTreeMap::new();
    weights.into_iter().for_each(|it| *totals.entry(it.0).or_default() += 1);
    let total = |(group, weights)| AmaxTotal { axes: plan.mesh.names(group), weights };
    totals.into_iter().map(total).collect()
}
