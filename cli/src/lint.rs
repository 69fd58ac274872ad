//! What is legal in a plan and probably not meant.

use ir::cost::{Target, Timeline};
use ir::graph::{Move, Reduction, WeightMeshLint, WeightMeshProblem};
use ir::model::Model;
use ir::placement::{AxisSet, Mesh};
use ir::plan::Plan;
use ir::summary::{Repeated, Summary};
use serde::Serialize;

use crate::report::{Ui, print_aside, warning};
use crate::table::{bytes, seconds};
use crate::target::Needs;
use crate::variants::{Variant, tp_across_nodes};

/// What to look for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Lint {
    /// A weight whose shards are of different sizes, so that some ranks hold padding.
    Uneven,
    /// A weight of which some ranks hold nothing.
    EmptyShards,
    /// A declared `weight_mesh` that does not name the axes that shard its weights, so that scales vary
    /// over some, or that names others.
    Amax,
    /// A weight or a batch of data that is moved, although the model says where it lives.
    Moved,
    /// Tensor parallelism that leaves a node of `--target`.
    TpAcrossNodes,
    /// Gradients that are reduced once a step, where `--target` is faster when they are reduced more often.
    LateReduction,
    /// A GEMM that a recipe quantizes and that stays as it is, such as one whose blocks tensor parallelism parts.
    Unquantized,
    /// Products and attention that several ranks compute alike, if they are a tenth of a rank's FLOPs or more.
    Repeated,
}

/// Share of a rank's FLOPs from which [`Lint::Repeated`] reports. Predicted steps are within a tenth of measured
/// ones (`docs/cost.md`), so a smaller share is within the error of a prediction. K and V projections that are
/// repeated because tp exceeds the KV heads are a few percent.
const REPEATED_SHARE: f64 = 0.1;

/// A lint and the tensors that it is about.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    /// The lint.
    pub lint: Lint,
    /// Names of tensors; none if it is about the mesh.
    pub tensors: Vec<String>,
    /// What is the matter with them, to follow their names, or with the mesh.
    pub what: String,
}

impl Lint {
    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Lint::Uneven => "uneven",
            Lint::EmptyShards => "empty-shards",
            Lint::Amax => "amax",
            Lint::Moved => "moved",
            Lint::TpAcrossNodes => "tp-across-nodes",
            Lint::LateReduction => "late-reduction",
            Lint::Unquantized => "unquantized",
            Lint::Repeated => "repeated",
        }
    }

    fn finds(self, plan: &Plan, buffer: ir::plan::Buffer) -> bool {
        let (data, mesh) = (&plan.buffers[buffer], &plan.mesh);
        match self {
            Lint::Uneven => !data.sharding.divides(&data.ty.shape, mesh),
            // Pieces are cut from the front, so whoever is last on every axis holds the least.
            Lint::EmptyShards => {
                let last: Vec<u32> = mesh.axes.iter().map(|it| it.size - 1).collect();
                data.sharding.extents(&data.ty.shape, mesh, &last).contains(&0)
            }
            Lint::Amax
            | Lint::Moved
            | Lint::TpAcrossNodes
            | Lint::LateReduction
            | Lint::Unquantized
            | Lint::Repeated => false,
        }
    }
}

/// What there is to say about a compiled model.
pub fn findings(compiled: &codegen::Compiled, summary: &Summary) -> Vec<Finding> {
    let codegen::Compiled { plan, moves, unquantized, weight_mesh_lints, .. } = compiled;
    let of_params = |lint: Lint, what: &str| {
        let found = plan.params.iter().filter(|it| lint.finds(plan, it.buffer));
        let tensors = found.map(|it| plan.buffers[it.buffer].name.clone()).collect();
        Finding { lint, tensors, what: what.to_string() }
    };
    let mut res = vec![
        of_params(Lint::Uneven, "have shards of different sizes, padded to the largest"),
        of_params(Lint::EmptyShards, "have ranks that hold nothing of them"),
        moved(moves),
        Finding {
            lint: Lint::Unquantized,
            tensors: unquantized.iter().map(|it| it.0.clone()).collect(),
            what: "are products that a recipe quantizes and that stay as they are (-v says why)"
                .into(),
        },
    ];
    res.extend(weight_mesh_lints.iter().map(|it| amax(it, &plan.mesh)));
    res.extend(repeated(summary, &plan.mesh));
    res.retain(|it| !it.tensors.is_empty());
    res
}

/// Findings on products that several ranks compute alike, one for each set of axes.
pub fn repeated(summary: &Summary, mesh: &Mesh) -> Vec<Finding> {
    let share = |it: &Repeated| it.flops as f64 / summary.flops as f64;
    let large = summary.repeated.iter().filter(|it| share(it) >= REPEATED_SHARE);
    let finding = |it: &Repeated| Finding {
        lint: Lint::Repeated,
        tensors: it.tensors.clone(),
        what: format!(
            "are computed by {} ranks alike, those along {}: {:.0} % of the FLOPs of a step",
            it.ranks,
            mesh.in_user_axes(&it.axes, ", "),
            100.0 * share(it)
        ),
    };
    large.map(finding).collect()
}

/// Warns of products that several ranks compute alike.
pub fn tell_repeated(plan: &Plan, ui: &Ui) {
    for it in repeated(&Summary::of(plan), &plan.mesh) {
        print_aside(&warning(ui, Some(it.lint.name()), &it.message()));
    }
}

/// What there is to say about a model's mesh on a machine.
pub fn of_target(model: &Model, mesh: &Mesh, target: &Target) -> Option<Finding> {
    let what = tp_across_nodes(model, mesh, target.ranks_per_node)?;
    Some(Finding { lint: Lint::TpAcrossNodes, tensors: Vec::new(), what })
}

/// A finding if the model reduces gradients once a step and reducing them every micro-batch is predicted to be faster.
pub fn of_reduction(variant: &Variant, plan: &Plan, target: &Target) -> Option<Finding> {
    if variant.model.reduce_gradients != Reduction::LastMicroBatch || plan.micro_batches == 1 {
        return None;
    }
    let mut every = variant.clone();
    every.model.reduce_gradients = Reduction::EveryMicroBatch;
    let every = every.price(u64::MAX).ok()??;
    let predicted = |it: &Plan| Timeline::predict(it, target).step_seconds();
    let needed = |it: &Plan| Needs::of(it, Some(target)).bytes();
    if predicted(plan) <= predicted(&every) {
        return None;
    }
    let what = format!(
        "a step with `reduce_gradients: LastMicroBatch` is predicted to take {}, and a rank needs {}; with \
         `EveryMicroBatch` {} and {}",
        seconds(predicted(plan)),
        bytes(needed(plan)),
        seconds(predicted(&every)),
        bytes(needed(&every))
    );
    Some(Finding { lint: Lint::LateReduction, tensors: Vec::new(), what })
}

fn moved(moves: &[Move]) -> Finding {
    let tensors = moves.iter().filter(|it| it.placed).map(|it| it.value.clone()).collect();
    let what = "are moved in every step, although the model places them".to_string();
    Finding { lint: Lint::Moved, tensors, what }
}

fn amax(lint: &WeightMeshLint, mesh: &Mesh) -> Finding {
    let names = |axes: AxisSet| mesh.in_user_axes(&mesh.names(axes), ", ");
    let axes = names(lint.axes);
    let (declared, sharded) = (names(lint.weight_mesh), names(lint.sharded));
    let misses = format!(
        "are sharded over {sharded}, of which `weight_mesh` ({declared}) misses {axes}: their scales"
    );
    let what = match lint.problem {
        WeightMeshProblem::Varies => format!("{misses} vary over {axes}"),
        WeightMeshProblem::Gathered => format!(
            "{misses} agree over {axes} all the same, because codes are gathered over {axes}"
        ),
        WeightMeshProblem::History => {
            format!("{misses} agree over {axes} all the same, because a history is one state")
        }
        WeightMeshProblem::Uneven => format!(
            "{misses} agree over {axes} all the same, because {axes} cuts no equal, contiguous pieces"
        ),
        WeightMeshProblem::Replicas => format!(
            "are sharded over {sharded} at most, and `weight_mesh` ({declared}) names {axes} too, over \
             which there are copies: these agree without a reduction"
        ),
    };
    Finding { lint: Lint::Amax, tensors: lint.weights.clone(), what }
}

impl Finding {
    /// ``uneven: `a`, `b` and 3 more have shards``.
    pub fn text(&self) -> String {
        format!("{}: {}", self.lint.name(), self.message())
    }

    /// The same without the name of the lint.
    pub fn message(&self) -> String {
        let shown: Vec<String> = self.tensors.iter().take(2).map(|it| format!("`{it}`")).collect();
        let more = match self.tensors.len() - shown.len() {
            0 => String::new(),
            n => format!(" and {n} more"),
        };
        let space = if shown.is_empty() { "" } else { " " };
        format!("{}{more}{space}{}", shown.join(", "), self.what)
    }
}
