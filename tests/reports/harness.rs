//! Compiles models from RON, trains them for a few steps, and compares what came out.

use std::collections::BTreeMap;

use ir::Graph;
use ir::model::{MeshSpec, ModelError};
use ir::plan::Plan;
use kernels::Proved;
use runtime::{Batch, Data, Session, SessionOptions};

/// `--set` options.
pub type Set<'a> = &'a [(&'a str, &'a str)];

/// Relative, of a tensor's L2 norm. One f32 operation rounds by 6e-8; a gradient here is a sum of at
/// most some hundred products behind some ten such sums, whose errors are independent: about
/// sqrt(10 * 100) roundings, 2e-6, if nothing cancels. Five times that allows for some cancellation.
pub const GRADIENT: f64 = 1e-5;
/// Relative: losses are means of positive numbers, so that nothing cancels at the end.
pub const LOSS: f64 = 3e-6;

/// What training came to.
pub struct Outcome {
    /// Mesh and options, for messages.
    pub what: String,
    pub plan: Plan,
    pub losses: Vec<f64>,
    pub norms: Vec<f64>,
    /// All tensors that outlive a step: parameters, and states as `NAME.exp_avg`.
    pub tensors: BTreeMap<String, Vec<f32>>,
}

pub fn logical(source: &str, mesh: &str, set: Set) -> Result<Graph, ModelError> {
    let model = ir::model::parse_with(source, set)?;
    ir::model::elaborate(&model, &MeshSpec::parse(mesh)?)
}

#[track_caller]
pub fn compile(source: &str, mesh: &str, set: Set) -> Proved {
    let graph = logical(source, mesh, set);
    let graph = graph.unwrap_or_else(|it| panic!("mesh {mesh}, {set:?}: {it} at {}", it.at));
    finish(graph)
}

/// Compiles a graph that a test has changed.
#[track_caller]
pub fn finish(graph: Graph) -> Proved {
    let compiled = codegen::compile(graph, &codegen::Options::default());
    compiled.unwrap_or_else(|it| panic!("{it}")).plan
}

/// The graph as it is after a pass.
#[track_caller]
pub fn after(pass: &str, source: &str, mesh: &str, set: Set) -> Graph {
    let dump_after = vec![pass.to_string()];
    let options = codegen::Options { dump_after, ..codegen::Options::default() };
    let graph = logical(source, mesh, set).unwrap();
    let compiled = codegen::compile(graph, &options).unwrap();
    ir::text::parse_graph(&compiled.dumps[0].text).unwrap()
}

/// `CODE: message; help: help` of a model that must not compile.
#[track_caller]
pub fn error(source: &str, mesh: &str, set: Set) -> String {
    let Err(error) = logical(source, mesh, set) else {
        panic!("mesh {mesh}, {set:?}: it compiles")
    };
    let help = error.help().map_or(String::new(), |it| format!("; help: {it}"));
    format!("{}: {error}{help}", error.code())
}

/// A session with initial weights, ready to step.
#[track_caller]
pub fn start(plan: &Proved) -> Session {
    let session = Session::new(plan, &SessionOptions::default()).unwrap();
    session.prepare().unwrap();
    session
}

/// Trains on generated data.
#[track_caller]
pub fn train(source: &str, mesh: &str, set: Set, steps: u64) -> Outcome {
    let plan = compile(source, mesh, set);
    let data = Data::synthetic(&plan.run, 7);
    let batches: Vec<Batch> = (0..steps).map(|it| data.batch(it).unwrap()).collect();
    train_on(&format!("mesh {mesh}, {set:?}"), plan, &batches)
}

/// Trains a step on each of these batches.
#[track_caller]
pub fn train_on(what: &str, plan: Proved, batches: &[Batch]) -> Outcome {
    let session = start(&plan);
    run(what, &session, batches)
}

#[track_caller]
pub fn run(what: &str, session: &Session, batches: &[Batch]) -> Outcome {
    let plan = session.plan().clone();
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for (step, batch) in batches.iter().enumerate() {
        let step = step as u64;
        let report = session.step(batch, plan.run.schedule.at(step), step + 1);
        let report = report.unwrap_or_else(|it| panic!("{what}: {it}"));
        losses.push(f64::from(report.loss.unwrap()));
        norms.push(f64::from(report.grad_norm.unwrap_or(0.0)));
    }
    let kept = plan.buffers.values().filter(|it| {
        matches!(it.role, ir::plan::Role::Param | ir::plan::Role::State) && it.ty.dtype.is_float()
    });
    let tensors = kept.map(|it| (it.name.clone(), session.read(&it.name).unwrap().data)).collect();
    Outcome { what: what.to_string(), plan, losses, norms, tensors }
}

impl Outcome {
    /// A parameter or a state.
    #[track_caller]
    pub fn tensor(&self, name: &str) -> &[f32] {
        let found = self.tensors.get(name);
        found.unwrap_or_else(|| panic!("{}: there is no `{name}`", self.what))
    }

    /// The gradient of a parameter in the first step, where SGD with momentum took one step: PyTorch
    /// starts the momentum buffer with the gradient.
    #[track_caller]
    pub fn gradient(&self, name: &str) -> &[f32] {
        assert_eq!(self.losses.len(), 1, "later buffers are sums of gradients");
        self.tensor(&format!("{name}.momentum_buffer"))
    }

    /// Names of the parameters.
    pub fn params(&self) -> Vec<String> {
        let params = self.plan.params.iter();
        params.map(|it| self.plan.buffers[it.buffer].name.clone()).collect()
    }

    /// Losses, norms, parameters and optimizer states are those of another run.
    #[track_caller]
    pub fn check_like(&self, expect: &Outcome) {
        let what = format!("{} against {}", self.what, expect.what);
        for (step, (&a, &b)) in self.losses.iter().zip(&expect.losses).enumerate() {
            close(a, b, LOSS, &format!("{what}: loss of step {step}"));
        }
        for (step, (&a, &b)) in self.norms.iter().zip(&expect.norms).enumerate() {
            close(a, b, GRADIENT, &format!("{what}: gradient norm of step {step}"));
        }
        for (name, expect) in &expect.tensors {
            check_tensor(self.tensor(name), expect, GRADIENT, &format!("{what}: {name}"));
        }
    }

    /// As [`Outcome::check_like`], bit by bit.
    #[track_caller]
    pub fn check_same(&self, expect: &Outcome) {
        let what = format!("{} against {}", self.what, expect.what);
        assert_eq!(self.losses, expect.losses, "{what}");
        assert_eq!(self.norms, expect.norms, "{what}");
        for (name, expect) in &expect.tensors {
            let bits = |it: &[f32]| it.iter().map(|it| it.to_bits()).collect::<Vec<u32>>();
            assert_eq!(bits(self.tensor(name)), bits(expect), "{what}: {name}");
        }
    }
}

/// Relative.
#[track_caller]
pub fn close(found: f64, expect: f64, tolerance: f64, what: &str) {
    let off = (found - expect).abs() / expect.abs();
    assert!(found == expect || off <= tolerance, "{what}: {found} is not {expect}, off by {off:e}");
}

/// Relative L2.
#[track_caller]
pub fn check_tensor(found: &[f32], expect: &[f32], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expect.len(), "{what}");
    let square = |it: f64| it * it;
    let off = found.iter().zip(expect).map(|(&a, &b)| square(f64::from(a) - f64::from(b)));
    let off = off.sum::<f64>().sqrt();
    let norm = expect.iter().map(|&it| square(it.into())).sum::<f64>().sqrt();
    assert!(off <= tolerance * norm, "{what}: off by {:e}, relative L2", off / norm);
    assert!(norm.is_finite(), "{what}: {norm}");
}

/// One row of a row-major matrix.
pub fn row(values: &[f32], row: usize, width: usize) -> &[f32] {
    &values[row * width..][..width]
}
