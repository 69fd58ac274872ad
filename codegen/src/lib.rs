//! From a graph to a plan: the pipeline, and the step between the two.

mod lower;
#[cfg(test)]
mod tests;
mod workspace;

use std::time::{Duration, Instant};

use ir::graph::{Cut, Def, Move, Name, WeightMeshLint};
use ir::plan::Plan;
use ir::verify::Property;
use ir::{DType, Digest, Graph, Phase};
use passes::{Dump, GRAPH_PASSES, PassError, PassManager, PlanMemory, ScheduleOverlap};

pub use kernels::{Proved, prove};
pub use lower::lower;
pub use passes::Verification;
pub use workspace::add_workspaces;

/// What the user may choose about compiling.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Passes to dump after, by name, or `all`; `lower` is one of them here.
    pub dump_after: Vec<String>,
    /// How far ahead communication runs.
    pub schedule: ScheduleOverlap,
    /// The passes after which programs are verified. With [`Verification::EveryPhase`], only the proof at the end
    /// checks plans.
    pub verification: Verification,
}

/// A compiled program.
#[derive(Debug, Clone)]
pub struct Compiled {
    /// The program.
    pub plan: Proved,
    /// Time of each pass, with its verification.
    pub times: Vec<(&'static str, Duration)>,
    /// The dumps that [`Options`] asked for.
    pub dumps: Vec<Dump>,
    /// What is moved because shardings disagree, in program order.
    pub moves: Vec<Move>,
    /// What GEMMs make that a recipe wants quantized and that are not, and why; in program order.
    pub unquantized: Vec<(Name, String)>,
    /// Weights in blocks, and how FSDP cuts them.
    pub cuts: Vec<Cut>,
    /// What is odd about declared weight meshes.
    pub weight_mesh_lints: Vec<WeightMeshLint>,
}

/// A graph that was not compiled.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct CompileError {
    /// Why.
    #[source]
    pub error: PassError,
    /// The dumps up to there.
    pub dumps: Vec<Dump>,
}

/// The name of the proof in [`Compiled::times`].
pub const PROVE: &str = "prove";

/// Compiles a graph in phase `Logical`: [`GRAPH_PASSES`], [`lower`], the options' [`ScheduleOverlap`],
/// [`add_workspaces`], [`PlanMemory`], and [`Proved::of`].
pub fn compile(graph: Graph, options: &Options) -> Result<Compiled, CompileError> {
    let mut manager = PassManager {
        dump_after: options.dump_after.clone(),
        verification: options.verification,
        ..PassManager::default()
    };
    match pipeline(graph, options, &mut manager) {
        Ok((plan, graph)) => {
            let PassManager { times, dumps, .. } = manager;
            let Graph { moves, unquantized, cuts, weight_mesh_lints, .. } = graph;
            Ok(Compiled { plan, times, dumps, moves, unquantized, cuts, weight_mesh_lints })
        }
        Err(error) => Err(CompileError { error, dumps: manager.dumps }),
    }
}

/// Returns the plan that [`compile`] makes, for its figures alone. No pass is verified and the plan is not proved,
/// which saves half of the time; the plan must not run. Returns `None` as soon as a rank is known to keep more than
/// `most` bytes between steps.
pub fn price(mut graph: Graph, options: &Options, most: u64) -> Result<Option<Plan>, PassError> {
    let mut manager = PassManager { verification: Verification::Never, ..PassManager::default() };
    check_size(graph.exceeds())?;
    for &pass in GRAPH_PASSES {
        manager.run(&mut graph, &[pass])?;
        if graph.phase < Phase::Sharded && kept_bytes(&graph) > most {
            return Ok(None);
        }
    }
    planned(&graph, options, &mut manager).map(Some)
}

/// Bytes that a rank keeps between steps at the least: master weights, what optimizers keep of them in f32, and sums
/// over micro-batches. Other states, such as weights to compute with, may still be fused away.
fn kept_bytes(graph: &Graph) -> u64 {
    let kept = graph.values.values().filter(|it| match it.def {
        Def::Param => true,
        Def::State | Def::Sum => it.ty.dtype == DType::F32,
        Def::Input | Def::Result { .. } => false,
    });
    let bytes = kept.filter_map(|it| {
        let elements = it.sharding.as_ref()?.local_elements(&it.ty.shape, &graph.mesh);
        Some(elements * it.ty.dtype.bytes())
    });
    bytes.sum()
}

/// An error of the user if a program is too large to be planned.
fn check_size(exceeds: Option<String>) -> Result<(), PassError> {
    match exceeds {
        Some(message) => Err(PassError::Failed { code: "PL0208", message, subject: None }),
        None => Ok(()),
    }
}

/// The plan of a graph in phase `Local`, with offsets.
fn planned(graph: &Graph, options: &Options, manager: &mut PassManager) -> Result<Plan, PassError> {
    let start = Instant::now();
    let mut plan = lower(graph);
    check_size(plan.exceeds())?;
    manager.finish("lower", (graph.phase, Phase::Lowered), &plan, start)?;
    manager.run(&mut plan, &[&options.schedule])?;
    add_workspaces(&mut plan);
    manager.run(&mut plan, &[&PlanMemory])?;
    Ok(plan)
}

/// The plan, and the graph that it was lowered from, with what passes report.
fn pipeline(
    mut graph: Graph,
    options: &Options,
    manager: &mut PassManager,
) -> Result<(Proved, Graph), PassError> {
    check_size(graph.exceeds())?;
    let model = Digest::of_model(&graph);
    manager.run(&mut graph, GRAPH_PASSES)?;
    // The proof checks all that a pass over plans must keep. Before it there is one such pass a phase.
    if manager.verification == Verification::EveryPhase {
        manager.verification = Verification::Never;
    }
    let mut plan = planned(&graph, options, manager)?;
    plan.model = Some(model);
    let start = Instant::now();
    let proved = Proved::of(plan);
    manager.times.push((PROVE, start.elapsed()));
    let broken = match proved {
        Ok(plan) => return Ok((plan, graph)),
        Err(proof) => proof.broken,
    };
    match broken.iter().find(|it| it.property == Some(Property::Program)) {
        // What `run` says of data is the user's, in IR.
        Some(it) => {
            let (code, message) = ("PL0612", it.to_string());
            Err(PassError::Failed { code, message, subject: None })
        }
        None => {
            let broken = broken.iter().map(|it| it.to_string()).collect();
            let mut passes = std::mem::take(&mut manager.unverified);
            passes.push(PROVE);
            Err(PassError::Broke { passes, broken })
        }
    }
}
