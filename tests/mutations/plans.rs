//! The plans that are mutated: small enough to be run thousands of times, and with all that plans have.

use ir::model::MeshSpec;
use ir::plan::Plan;

/// A plan and what is special about it.
pub struct Subject {
    /// A name for the table.
    pub name: &'static str,
    /// The plan.
    pub plan: Plan,
}

/// A Llama of one or two layers.
fn llama(dim: u32, heads: u32, ffn: u32, layers: u32, more: &str) -> String {
    let kv = heads / 2;
    format!(
        r#"Model(
            name: "tiny",
            batch: Global(8),
            sequence: 8,
            sequence_parallel: true,
            optimizer: AdamW(betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1),
            schedule: (lr: 1e-2),
            {more}
            layers: [
                Embedding(name: "embed", vocab: 48, dim: {dim}),
                Repeat(n: {layers}, prefix: "layers", body: [
                    TransformerLayer(
                        norm: RmsNorm(eps: 1e-5),
                        attention: (heads: {heads}, kv_heads: {kv}, rope: (theta: 10000)),
                        mlp: (ffn: {ffn}, activation: swiglu),
                        bias: false,
                    ),
                ]),
                RmsNorm(name: "norm", eps: 1e-5),
                LmHead(name: "lm_head"),
                CrossEntropy(),
            ],
        )"#
    )
}

/// `y = x + x A^T + x B^T` in FP8: one gradient for both weights.
const TWO_WEIGHTS: &str = r#"Model(
    name: "two weights",
    batch: Global(8),
    sequence: 16,
    recipe: Float8CurrentScaling(),
    precision: (compute: bf16),
    optimizer: AdamW(weight_decay: 0.1),
    schedule: (lr: 1e-2),
    clip_norm: 0.5,
    layers: [
        Embedding(name: "embed", vocab: 16, dim: 32),
        Block(
            inputs: ["x"],
            params: { "a": (shape: [32, 32]), "b": (shape: [32, 32], init: Normal(std: 0.1)) },
            ops: [
                (op: "matmul(transpose_b:true)", inputs: ["x", "a"], outputs: ["p"]),
                (op: "matmul(transpose_b:true)", inputs: ["x", "b"], outputs: ["q"]),
                (op: "add", inputs: ["x", "p", "q"], outputs: ["y"]),
            ],
            outputs: ["y"],
        ),
        LmHead(name: "head"),
        CrossEntropy(),
    ],
)"#;

/// The plan of a model on a mesh; none if that is no model for it, or what went wrong in a pass.
pub fn compiled(source: &str, mesh: &str, set: &[(&str, &str)]) -> Result<Plan, Option<String>> {
    let model = ir::model::parse_with(source, set).map_err(|_| None)?;
    let mesh = MeshSpec::parse(mesh).map_err(|_| None)?;
    let graph = ir::model::elaborate(&model, &mesh).map_err(|_| None)?;
    let compiled = codegen::compile(graph, &codegen::Options::default());
    compiled.map(|it| it.plan.into_plan()).map_err(|it| Some(it.to_string()))
}

/// FSDP x TP; replicated KV heads; HSDP with micro-batches; checkpointing, with a coordinate whose shards
/// are empty; FP8 with delayed scaling; FP8 in blocks, between which FSDP cuts; two weights with one gradient.
pub fn subjects() -> Vec<Subject> {
    let subject = |name, source: &str, mesh: &str, set: &[(&str, &str)]| Subject {
        name,
        plan: compiled(source, mesh, set).expect("it compiles"),
    };
    let fp8 = "recipe: DelayedScaling(amax_history_len: 4), precision: (compute: bf16), micro_batches: 2,";
    let blocks = "recipe: Float8BlockScaling(), precision: (compute: bf16),";
    vec![
        subject("2x2", &llama(16, 4, 24, 2, ""), "2x2", &[]),
        subject(
            "2x4 bf16",
            &llama(16, 4, 24, 1, "precision: (compute: bf16, reduce: f32),"),
            "2x4",
            &[],
        ),
        subject(
            "2x2x2 micro-batches",
            &llama(16, 4, 24, 1, "micro_batches: 2,"),
            "dp_replicate=2,dp_shard=2,tp=2",
            &[],
        ),
        // 20 rows over 8 coordinates are 3, 3, 3, 3, 3, 3, 2 and none.
        subject("8 checkpoint, empty shards", &llama(20, 2, 24, 2, "checkpoint: Full,"), "8", &[]),
        subject("2x2x2 fp8", &llama(64, 4, 128, 1, fp8), "2x2x2", &[]),
        // Of 5 blocks two coordinates have 3 and 2.
        subject("2 blocks", &llama(128, 2, 640, 1, blocks), "2", &[]),
        subject("2x2 one gradient of two weights", TWO_WEIGHTS, "2x2", &[]),
    ]
}
