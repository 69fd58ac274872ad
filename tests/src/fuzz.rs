//! The functions that the command calls on files of its users and on what it hears from other processes, on bytes
//! that may be anything.
//!
//! The binaries of `tests/fuzz` search for bytes on which one of these panics, hangs or takes much
//! memory; `tests/fuzz.rs` replays what they found. A mistake in the input ends in an error of a
//! library, and its text and place are made, as for a report.
//!
//! Options stand in comments at the start of a model, so that a seed is a file that `planc` reads:
//!
//! ```text
//! // --mesh 2x4
//! // --set micro_batches=2
//! ```

use std::ops::Range;
use std::sync::LazyLock;

use checkpoint::{Metadata, cover};
use ir::checkpoint::CheckpointLayout;
use ir::cost::{Target, Timeline};
use ir::meaning::{Meaning, diff};
use ir::model::modules::Module;
use ir::model::{MeshSpec, ModelError};
use ir::plan::{Plan, memory_profile};
use ir::text::{Program, parse, print_plan};
use ir::{Graph, Phase};
use passes::PassError;
use runtime::comm::control::frame::{Frames, HEAD, Limits, Message, Refusal, Seal, Sender};

/// Models of more modules than this, repetitions included, are parsed and not compiled. Compiling takes
/// time in proportion to modules, and 10,000 layers are legal.
const MODULES: u64 = 24;

/// Reads a model, with its options, and compiles it.
pub fn model(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let (mesh, sets) = options(text);
    let point = |it: ModelError| {
        check_text(&format!("{} {it} {:?}", it.code(), it.help()));
        check_span(text, it.span(text));
    };
    let model = match ir::model::parse_with(text, &sets) {
        Ok(it) => it,
        Err(it) => return point(it),
    };
    let mesh = match MeshSpec::parse(mesh) {
        Ok(it) => it,
        Err(it) => return point(it),
    };
    if count(&model.layers) > MODULES {
        return;
    }
    match ir::model::elaborate(&model, &mesh) {
        Ok(graph) => {
            if let Some(plan) = compile(graph) {
                let printed = print_plan(&plan);
                assert_eq!(ir::text::parse_plan(&printed).as_ref(), Ok(&plan), "{printed}");
                look_at(&plan);
            }
        }
        Err(it) => point(it),
    }
}

/// Reads a plan or IR, proves or verifies it, and prints it. What passes is looked at as the commands
/// that take plans do.
pub fn plan(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let program = match parse(text) {
        Ok(it) => it,
        Err(it) => {
            check_text(&it.to_string());
            return check_span(text, Some(it.span));
        }
    };
    let printed = program.to_string();
    let again = parse(&printed).unwrap_or_else(|it| panic!("{it} in what was printed: {printed}"));
    assert_eq!(again.to_string(), printed, "printed twice");
    match program {
        Program::Graph(graph) => {
            for it in ir::verify::graph::verify(&graph) {
                check_text(&it.to_string());
            }
        }
        Program::Plan(plan) => {
            let proof = codegen::prove(&plan);
            for it in &proof.broken {
                check_text(&it.to_string());
            }
            if proof.broken.is_empty() {
                look_at(&plan);
            }
        }
    }
}

/// Reads a machine profile, and predicts with it.
pub fn profile(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match Target::parse(text) {
        Ok(target) => PLANS.iter().for_each(|it| price(it, &target)),
        Err(it) => {
            check_text(&it.to_string());
            check_span(text, it.span(text));
        }
    }
}

/// Reads frames as they come to a process from one that it has let in, and from one that it has not. The first
/// byte says who sends them: `0` for rank 0. Tags are left out, since no search finds one.
pub fn frames(bytes: &[u8]) {
    let (sender, bytes) = match bytes.split_first() {
        Some((b'0', rest)) => (Sender::First, rest),
        Some((_, rest)) => (Sender::Other, rest),
        None => return,
    };
    let limits = Limits { data: 4096 };
    let seal = Seal::new([0; 32]);
    // Without a tag there is no message, whatever else is right.
    assert!(Frames::new(seal.clone(), sender, limits).read(&mut &bytes[..]).is_err());
    let mut rest = bytes;
    while let Some((head, after)) = rest.split_first_chunk::<HEAD>() {
        let Ok(length) = limits.length(*head, sender) else { return };
        let Some((payload, next)) = after.split_at_checked(length) else { return };
        if let Ok(message) = Message::decode(head[0], payload.to_vec()) {
            let sent = seal.clone().frame(&message);
            let heard = Frames::new(seal.clone(), sender, limits).read(&mut &sent[..]);
            assert_eq!(heard.expect("it was within its limits"), message);
            check_shown(&message);
        }
        rest = next;
    }
}

/// Text of another process may reach a terminal.
fn check_shown(message: &Message) {
    let texts = match message {
        Message::Hello(it) => {
            let facts = it.facts.iter().flat_map(|it| [&it.0, &it.1]);
            let failed = it.failed.iter().flat_map(|it| [&it.code, &it.message]);
            facts.chain(failed).chain([&it.host]).collect()
        }
        Message::Refused(Refusal::Differs { who, differences }) => {
            differences.iter().chain([who]).collect()
        }
        Message::Joined(text) | Message::Position(text) => vec![text],
        Message::Fail(it) => vec![&it.code, &it.message],
        Message::Refused(Refusal::Complete)
        | Message::Go
        | Message::Data(_)
        | Message::Wish(_)
        | Message::Plan(..)
        | Message::Agreed
        | Message::Port(_)
        | Message::Beat
        | Message::Bye => Vec::new(),
    };
    for text in texts {
        assert!(text.len() <= 8192 && !text.chars().any(char::is_control), "{text:?}");
    }
}

/// Reads the index of a checkpoint, looks for what its boxes do not cover, and writes it again.
pub fn metadata(bytes: &[u8]) {
    let index = match Metadata::read(bytes) {
        Ok(it) => it,
        Err(it) => return check_text(&it.to_string()),
    };
    for tensor in index.tensors.values() {
        if let Err(it) = cover::check(&tensor.shape, tensor.chunks.iter().map(|it| &it.chunk)) {
            check_text(&it.to_string());
        }
    }
    index.problems.iter().for_each(|it| check_text(it));
    let mut written = Vec::new();
    index.write(&mut written).expect("memory takes what is written");
    let again = Metadata::read(&written).unwrap_or_else(|it| panic!("{it} in what was written"));
    assert_eq!(again.save_id, index.save_id, "written and read again");
    assert!(again.tensors.keys().eq(index.tensors.keys()), "written and read again");
    let mut twice = Vec::new();
    again.write(&mut twice).expect("memory takes what is written");
    assert_eq!(twice, written, "written twice");
}

/// The options in `// --mesh` and `// --set` comments at the start of a model.
fn options(text: &str) -> (&str, Vec<(&str, &str)>) {
    let (mut mesh, mut sets) = ("2x2", Vec::new());
    for line in text.lines().map_while(|it| it.strip_prefix("//")) {
        match line.trim().split_once(' ') {
            Some(("--mesh", it)) => mesh = it,
            Some(("--set", it)) => {
                sets.extend(it.split_once('=').map(|it| (it.0.trim(), it.1.trim())));
            }
            _ => {}
        }
    }
    (mesh, sets)
}

/// Modules that these become, each as often as it is repeated.
fn count(modules: &[Module]) -> u64 {
    let of = |it: &Module| match it {
        Module::Repeat(it) => u64::from(it.n).saturating_mul(count(&it.body)),
        Module::Residual(it) => 1 + count(&it.body),
        // A chunk of a loss is a few ops, of which a layer has more.
        Module::LmHead(it) => 1 + it.chunks / 4,
        // The others hold no modules.
        _ => 1,
    };
    modules.iter().map(of).fold(0, u64::saturating_add)
}

/// Compiles a graph. What a user did wrong is an error; that a pass breaks its promise is ours.
fn compile(graph: Graph) -> Option<Plan> {
    assert_eq!(graph.phase, Phase::Logical);
    match codegen::compile(graph, &codegen::Options::default()) {
        Ok(it) => Some(it.plan.into_plan()),
        Err(it) => match it.error {
            PassError::Failed { message, .. } => {
                check_text(&message);
                None
            }
            PassError::Broke { .. } => panic!("{}", it.error),
        },
    }
}

/// Calls the analyses that `compile`, `diff`, `run` and the page make of a plan that holds.
fn look_at(plan: &Plan) {
    let meaning = Meaning::of(plan);
    assert!(diff(&meaning, &meaning).is_empty(), "a plan is not what it is");
    assert!(memory_profile(plan).total_bytes() >= plan.persistent_bytes);
    if let Err(it) = CheckpointLayout::of(plan) {
        check_text(&it.to_string());
    }
    price(plan, Target::reference());
}

fn price(plan: &Plan, target: &Target) {
    if !target.multiplies(plan) {
        return;
    }
    let cost = Timeline::predict(plan, target).step_cost(plan, target);
    let shares = cost.of_fp8_peak.into_iter().chain([cost.of_bf16_peak]);
    let shares = shares.flat_map(|it| [it.mfu, it.hfu]);
    let times = [cost.seconds, cost.exposed_seconds, cost.communication_seconds];
    let mut figures = times.into_iter().chain(shares);
    assert!(figures.all(|it| it.is_finite() && it >= 0.0), "{cost:?}");
}

fn check_text(text: &str) {
    assert!(!text.is_empty(), "an error that says nothing");
}

/// A report cuts the text there.
fn check_span(text: &str, span: Option<Range<usize>>) {
    if let Some(span) = span {
        assert!(text.get(span.clone()).is_some(), "{span:?} is no part of {} bytes", text.len());
    }
}

/// Plans of two examples, of which one multiplies in FP8.
static PLANS: LazyLock<[Plan; 2]> = LazyLock::new(|| {
    let texts =
        [include_str!("../../examples/mlp.ron"), include_str!("../../examples/llama-tiny-fp8.ron")];
    texts.map(|text| {
        let model = ir::model::parse(text).expect("an example");
        let mesh = MeshSpec::parse("2x2").expect("a mesh");
        let graph = ir::model::elaborate(&model, &mesh).expect("an example");
        compile(graph).expect("an example")
    })
});
