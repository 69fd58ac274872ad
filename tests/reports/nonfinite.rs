//! Steps that are skipped: nothing of them is left, and the first number that is not finite is traced to its instruction.

use runtime::{Batch, Data, Session, Skip, StepReport};
use tests::state;

use crate::harness::{compile, start};

/// A Llama of one layer with dims that all recipes take.
const MODEL: &str = r#"Model(
    name: "skipped",
    batch: Global(4),
    sequence: 32,
    precision: (compute: bf16),
    optimizer: AdamW(betas: (0.9, 0.95), weight_decay: 0.1),
    schedule: (lr: 1e-2),
    layers: [
        Embedding(name: "embed", vocab: 64, dim: 64),
        Repeat(n: 1, prefix: "layers", body: [
            TransformerLayer(
                norm: RmsNorm(eps: 1e-5),
                attention: (heads: 2, rope: (theta: 10000)),
                mlp: (ffn: 128, activation: swiglu),
                bias: false,
            ),
        ]),
        RmsNorm(name: "norm", eps: 1e-5),
        LmHead(name: "lm_head"),
        CrossEntropy(),
    ],
)"#;

struct Run {
    session: Session,
    batches: Vec<Batch>,
}

impl Run {
    fn new(mesh: &str, set: &[(&str, &str)]) -> Run {
        Run::of(MODEL, mesh, set)
    }

    fn of(model: &str, mesh: &str, set: &[(&str, &str)]) -> Run {
        let session = start(&compile(model, mesh, set));
        let data = Data::synthetic(&session.plan().run, 7);
        Run { session, batches: (0..3).map(|it| data.batch(it).unwrap()).collect() }
    }

    fn step(&self, batch: usize) -> StepReport {
        self.session.step(&self.batches[batch], 1e-2, batch as u64 + 1).unwrap()
    }

    /// A parameter with one value everywhere, and what it was.
    fn fill(&self, param: &str, value: f32) -> Vec<f32> {
        let before = self.session.read(param).unwrap().data;
        self.session.write(param, &vec![value; before.len()]).unwrap();
        self.session.prepare().unwrap();
        before
    }

    fn put_back(&self, param: &str, values: &[f32]) {
        self.session.write(param, values).unwrap();
        self.session.prepare().unwrap();
    }
}

#[track_caller]
fn check(mesh: &str, set: &[(&str, &str)]) {
    let what = format!("mesh {mesh}, {set:?}");
    let [run, straight] = [(); 2].map(|()| Run::new(mesh, set));
    for it in [&run, &straight] {
        assert_eq!(it.step(0).skipped, None, "{what}");
    }
    let before = state(&run.session);
    // An infinite weight of a norm makes all that follows infinite or no number.
    let weight = run.fill("norm.weight", f32::INFINITY);
    let report = run.step(1);
    assert_eq!(report.skipped, Some(Skip::Nonfinite), "{what}");
    run.put_back("norm.weight", &weight);
    for (name, before) in &before {
        assert!(state(&run.session)[name] == *before, "{what}: `{name}` changed");
    }
    let nothing =
        Batch { labels: vec![-100; run.batches[1].labels.len()], ..run.batches[1].clone() };
    let report = run.session.step(&nothing, 1e-2, 2).unwrap();
    assert_eq!(report.skipped, Some(Skip::NoLabels), "{what}");
    assert!(state(&run.session) == before, "{what}: a step without labels changed something");
    assert_eq!(run.step(2).results, straight.step(2).results, "{what}");
    assert!(state(&run.session) == state(&straight.session), "{what}: after the next step");
}

#[test]
fn a_step_that_is_skipped_leaves_no_trace() {
    for mesh in ["1", "2x2"] {
        check(mesh, &[]);
        check(mesh, &[("recipe", "DelayedScaling(amax_history_len: 4)")]);
        check(mesh, &[("recipe", "Float8CurrentScaling()")]);
    }
    let micro = [("micro_batches", "2"), ("recipe", "DelayedScaling(amax_history_len: 4)")];
    check("2", &micro);
    check("2", &[micro[0], micro[1], ("reduce_gradients", "LastMicroBatch")]);
    check("2", &[("optimizer", "Sgd(momentum: 0.9)")]);
    check("2", &[("optimizer", "Adam()"), ("micro_batches", "2")]);
}

/// Sums of 64 products with a weight of 3e38 are more than f32 or bf16 hold.
#[test]
fn the_first_number_that_is_not_finite_is_traced() {
    for mesh in ["1", "2x2"] {
        let run = Run::new(mesh, &[]);
        run.step(0);
        run.fill("lm_head.weight", 3e38);
        assert_eq!(run.step(1).skipped, Some(Skip::Nonfinite));
        let before = state(&run.session);
        let (report, found) = run.session.search_step(&run.batches[1], 1e-2, 2).unwrap();
        assert_eq!(report.skipped, Some(Skip::Nonfinite), "the repeat is skipped, too");
        assert!(state(&run.session) == before, "the repeat leaves no trace");
        assert_eq!(found.len() as u64, run.session.plan().mesh.n_ranks());
        for (rank, text) in found.iter().enumerate() {
            assert!(text.starts_with(&format!("rank {rank} (")), "{text}");
            assert!(text.contains("`matmul"), "{text}");
            assert!(text.contains("making `lm_head.logits`"), "{text}");
            assert!(text.ends_with("its operands are finite"), "{text}");
        }
        let (_, found) = {
            run.fill("lm_head.weight", 0.5);
            run.fill("norm.weight", f32::NAN);
            run.session.search_step(&run.batches[1], 1e-2, 2).unwrap()
        };
        assert!(found[0].contains("norm.weight"), "{}", found[0]);
        assert!(found[0].contains("is not finite before the step"), "{}", found[0]);
    }
}

/// Two projections in a row, one of which a recipe quantizes.
fn two_projections(quantized: &str, recipe: &str) -> String {
    let recipe_of = |name: &str| if name == quantized { recipe } else { "Bf16" };
    format!(
        r#"Model(
    name: "watched",
    batch: Global(4),
    sequence: 128,
    precision: (compute: bf16),
    init: Normal(std: 1),
    schedule: (lr: 1e-2),
    layers: [
        Embedding(name: "embed", vocab: 64, dim: 256),
        Repeat(n: 1, prefix: "layers", body: [
            Residual(body: [
                Linear(name: "a", out_features: 256, bias: false, parallel_mode: Column, recipe: {}),
                Linear(name: "b", out_features: 256, bias: false, parallel_mode: Row, recipe: {}),
            ]),
        ]),
        RmsNorm(name: "norm", eps: 1e-5),
        LmHead(name: "lm_head"),
        CrossEntropy(),
    ],
)"#,
        recipe_of("a"),
        recipe_of("b")
    )
}

/// Recipes, and whether what stands for an infinite number is finite.
const RECIPES: [(&str, bool); 5] = [
    ("DelayedScaling(amax_history_len: 4)", true),
    ("Float8CurrentScaling()", true),
    ("Float8BlockScaling()", true),
    ("MXFP8BlockScaling()", false),
    ("NVFP4BlockScaling()", false),
];

/// Makes what is between the projections infinite, in the forward or the backward pass, and all that follows zero.
#[track_caller]
fn check_amax(mesh: &str, micro_batches: &str, recipe: (&str, bool), [huge, quantized]: [&str; 2]) {
    let what = format!("mesh {mesh}, {micro_batches} micro-batches, {recipe:?}, {huge} is huge");
    let run =
        Run::of(&two_projections(quantized, recipe.0), mesh, &[("micro_batches", micro_batches)]);
    assert_eq!(run.step(0).skipped, None, "{what}");
    let before = state(&run.session);
    let [huge, zero] = [huge, quantized].map(|it| format!("layers.0.{it}.weight"));
    let weights = [run.fill(&huge, 3e38), run.fill(&zero, 0.0)];
    let report = run.step(1);
    assert_eq!(report.skipped, Some(Skip::Nonfinite), "{what}");
    let of = |name: &str| report.results.iter().find(|it| it.0 == name).unwrap().1;
    let is_finite = of("loss").is_finite() && of("grad_norm").is_finite();
    assert_eq!(is_finite, recipe.1, "{what}: {:?}", report.results);
    let (_, found) = run.session.search_step(&run.batches[1], 1e-2, 2).unwrap();
    for text in &found {
        assert!(text.contains("`matmul"), "{what}: {text}");
        assert!(text.contains("making `layers.0."), "{what}: {text}");
        assert!(text.ends_with("its operands are finite"), "{what}: {text}");
    }
    run.put_back(&huge, &weights[0]);
    run.put_back(&zero, &weights[1]);
    for (name, after) in state(&run.session) {
        assert!(after == before[&name], "{what}: `{name}` changed");
    }
    assert_eq!(run.step(2).skipped, None, "{what}");
}

#[test]
fn a_step_with_an_infinite_amax_is_skipped() {
    for mesh in ["1", "2x2"] {
        for micro_batches in ["1", "2"] {
            for recipe in RECIPES {
                check_amax(mesh, micro_batches, recipe, ["a", "b"]);
                check_amax(mesh, micro_batches, recipe, ["b", "a"]);
            }
        }
    }
}
