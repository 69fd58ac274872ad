//! What plans of whole models contain: collectives against the ideal, and nothing per rank.

use std::collections::BTreeSet;

use ir::Op;
use ir::model::MeshSpec;
use ir::plan::{Instruction, Plan, PlanSection};
use ir::summary::Summary;
use ir::text::{parse_plan, print_plan};
use tests::example;

fn compile(source: &str, mesh: &str, set: &[(&str, &str)]) -> Plan {
    let model = ir::model::parse_with(source, set).unwrap();
    let graph = ir::model::elaborate(&model, &MeshSpec::parse(mesh).unwrap()).unwrap();
    codegen::compile(graph, &codegen::Options::default()).unwrap().plan.into_plan()
}

/// Calls of one kind over one set of axes.
fn calls(summary: &Summary, axes: &str, kind: &str) -> u64 {
    let of = |it: &&ir::summary::CollectiveTotal| it.axes == axes && it.kind == kind;
    summary.collectives.iter().filter(of).map(|it| it.count).sum()
}

fn wire_gb(summary: &Summary) -> f64 {
    summary.wire_bytes() as f64 / 1e9
}

/// Llama-3-8B, sequence 4096, global batch 2, bf16, sequence parallel, on dp=2 x tp=4. The ideal
/// counts and the peers' bytes are those of `docs/baselines.md`.
#[test]
fn collectives_of_llama3_8b_are_the_ideal() {
    const L: u64 = 32;
    let plan = compile(&example("llama3-8b"), "2x4", &[]);
    let summary = Summary::of(&plan);
    let rows = [
        ("tp", "all_gather", 4 * L + 2),
        ("tp", "reduce_scatter", 4 * L + 2),
        ("dp", "all_gather", 2 * L + 1),
        // Two calls more than the ideal. Embedding and head are units of their own, so that the head's
        // gradient need not be kept through the backward pass. And what each rank finds in its rows of
        // the embedding is summed: one of the gathers is that of the ids instead of the table.
        ("dp", "reduce_scatter", L + 3),
        // Norm weights in one call; maximum, then sums, of the vocabulary-parallel cross-entropy.
        ("tp", "all_reduce", 3),
        // The loss and its token count.
        ("dp", "all_reduce", 1),
        // The gradient norm.
        ("dp, tp", "all_reduce", 1),
    ];
    println!("8B on 2x4             planc  ideal");
    for (axes, kind, ideal) in rows {
        println!("{axes:>6} {kind:<15} {:>5}  {ideal:>5}", calls(&summary, axes, kind));
    }
    println!("ring wire, GB: planc {:.2}, XLA 12.7, PyTorch 14.3 (f32 reduce)", wire_gb(&summary));
    for (axes, kind, ideal) in rows {
        assert_eq!(calls(&summary, axes, kind), ideal, "{kind} over {axes}");
    }
    let all: u64 = summary.collectives.iter().map(|it| it.count).sum();
    assert_eq!(all, rows.iter().map(|it| it.2).sum::<u64>(), "no other collective: {summary:#?}");
    assert!(wire_gb(&summary) <= 12.4, "{}", wire_gb(&summary));
}

#[test]
fn keeping_weights_after_forward_saves_their_second_gather() {
    let plan = compile(&example("llama3-8b"), "2x4", &[("fsdp.reshard_after_forward", "false")]);
    let summary = Summary::of(&plan);
    assert_eq!(calls(&summary, "dp", "all_gather"), 34);
    println!("ring wire, GB, weights kept: planc {:.2}", wire_gb(&summary));
    assert!(wire_gb(&summary) <= 10.6, "{}", wire_gb(&summary));
}

/// Every gather of a weight or an activation moves two bytes an element. Ids are integers.
#[test]
fn gathers_are_in_bf16() {
    let plan = compile(&example("llama3-8b"), "2x4", &[]);
    for instruction in plan.sections.iter().flatten() {
        let Instruction::Collective { kind: ir::ops::CollectiveKind::AllGather, parts, .. } =
            instruction
        else {
            continue;
        };
        for part in parts {
            let data = &plan.buffers[part.dst];
            let ids = data.name == "tokens.full";
            let dtype = if ids { ir::DType::I32 } else { ir::DType::Bf16 };
            assert_eq!(data.ty.dtype, dtype, "{}", data.name);
        }
    }
}

const FP8: (&str, &str) = ("recipe", "Float8CurrentScaling()");

/// Weights' amaxes are reduced in one call, which is not in the step but behind the optimizer; what FSDP gathers
/// for the GEMMs is a byte an element.
#[test]
fn an_fp8_step_reduces_amaxes_of_weights_once_and_gathers_bytes() {
    let plan = compile(&example("llama-tiny-fp8"), "2x4", &[]);
    let quantized = |name: &str| name.contains("_proj");
    let (mut reductions, mut gathered) = (Vec::new(), 0);
    for section in [PlanSection::Step, PlanSection::Update] {
        for instruction in plan.section(section) {
            let Instruction::Collective { kind, comm, parts, .. } = instruction else { continue };
            let names: Vec<&str> = parts.iter().map(|it| &*plan.buffers[it.src].name).collect();
            match kind {
                ir::ops::CollectiveKind::AllReduce(ir::placement::ReduceOp::Max)
                    if names.iter().any(|it| it.contains("weight")) =>
                {
                    reductions.push((section, plan.mesh.names(plan.comms[*comm]), names.len()));
                }
                ir::ops::CollectiveKind::AllGather
                    if plan.mesh.names(plan.comms[*comm]) == "dp" =>
                {
                    for part in parts.iter().filter(|it| quantized(&plan.buffers[it.src].name)) {
                        let data = &plan.buffers[part.dst];
                        assert_eq!(data.ty.dtype, ir::DType::E4M3, "{}", data.name);
                        gathered += 1;
                    }
                }
                _ => (),
            }
        }
    }
    // 4 layers of 7 projections.
    assert_eq!(reductions, [(PlanSection::Update, "dp, tp".to_string(), 28)]);
    assert!(gathered >= 28, "{gathered} weights are gathered");
}

/// Llama-3-8B in FP8 against itself in bf16, where both gather weights again for the backward pass.
/// All amaxes of a step reach `clip_scale`, by four launches at most, and reduced in calls that are made anyway.
#[test]
fn amaxes_of_a_step_are_watched() {
    for recipe in ["DelayedScaling()", "Float8CurrentScaling()", "Float8BlockScaling()"] {
        let plan = compile(&example("llama3-8b"), "2x4", &[("recipe", recipe)]);
        let (mut made, mut watched) = (BTreeSet::new(), BTreeSet::new());
        let mut n_launches = 0;
        for instruction in plan.section(PlanSection::Step) {
            let Instruction::Compute { op, args, .. } = instruction else { continue };
            match op {
                Op::QuantScale(_) => _ = made.insert(args[0]),
                Op::DelayedUpdate(_) => _ = made.insert(args[1]),
                Op::Watch(_) => {
                    n_launches += 1;
                    watched.extend(args.iter().copied());
                }
                _ => (),
            }
        }
        let missing: Vec<&str> =
            made.difference(&watched).map(|&it| plan.buffers[it].name.as_str()).collect();
        assert!(missing.is_empty(), "{recipe}: {missing:?} are not watched");
        assert!(watched.len() > 7 * 32, "{recipe}: {} amaxes", watched.len());
        assert!(n_launches <= 4, "{recipe}: {n_launches} launches");
        let summary = Summary::of(&plan);
        assert_eq!(calls(&summary, "dp", "all_reduce"), 1, "{recipe}: the loss");
    }
}

#[test]
fn fp8_sends_three_quarters_of_the_bytes_of_bf16() {
    let summary = |set: &[(&str, &str)]| Summary::of(&compile(&example("llama3-8b"), "2x4", set));
    let (bf16, fp8) = (summary(&[]), summary(&[FP8]));
    let tp_gathers = |it: &Summary| -> u64 {
        let of =
            it.collectives.iter().filter(|it| it.kind == "all_gather" && it.axes.starts_with("tp"));
        of.map(|it| it.wire_bytes).sum()
    };
    let whole = bf16.wire_bytes() as f64;
    let ratio = fp8.wire_bytes() as f64 / whole;
    let in_bf16 = fp8.wire_bytes() - tp_gathers(&fp8) + tp_gathers(&bf16);
    let weights_only = in_bf16 as f64 / whole;
    println!(
        "8B on 2x4, ring wire, FP8 over bf16: {ratio:.3}; activations in bf16: {weights_only:.3}"
    );
    assert!(ratio <= 0.74, "{ratio}");
    assert!(weights_only <= 0.87, "{weights_only}");
    assert_eq!(fp8.amax_groups.len(), 1, "{:?}", fp8.amax_groups);
    assert_eq!((fp8.amax_groups[0].axes.as_str(), fp8.amax_groups[0].weights), ("dp, tp", 224));
    assert_eq!(bf16.amax_groups, []);
}

/// The toy of `docs/baselines.md`: 4 layers, d 512, 8 heads, 4 KV, ffn 1536, vocabulary 32000, sequence
/// 512, global batch 8.
#[test]
fn wire_bytes_of_the_toy() {
    let toy = r#"Model(
        name: "toy",
        batch: Global(8),
        sequence: 512,
        sequence_parallel: true,
        precision: (compute: bf16, reduce: bf16),
        layers: [
            Embedding(name: "model.embed_tokens", vocab: 32000, dim: 512),
            Repeat(n: 4, prefix: "model.layers", body: [
                TransformerLayer(
                    norm: RmsNorm(eps: 1e-5),
                    attention: (heads: 8, kv_heads: 4, rope: (theta: 10000)),
                    mlp: (ffn: 1536, activation: swiglu),
                    bias: false,
                ),
            ]),
            RmsNorm(name: "model.norm", eps: 1e-5),
            LmHead(name: "lm_head"),
            CrossEntropy(),
        ],
    )"#;
    let summary = Summary::of(&compile(toy, "2x4", &[]));
    println!("toy, MB: planc {:.1}, PyTorch 82.5, XLA 91.1", 1e3 * wire_gb(&summary));
    assert!(1e3 * wire_gb(&summary) <= 83.0, "{summary:#?}");
}

/// The program of 8B on 2x4 and on 1024x8 is the same, but for sizes. Both have more tokens than rows
/// of the embedding: with fewer, the lookup is made where the rows are.
#[test]
fn instructions_do_not_depend_on_mesh_sizes() {
    let source = example("llama3-8b");
    let small = compile(&source, "2x4", &[("batch", "PerReplica(4)")]);
    let large = compile(&source, "1024x8", &[("batch", "PerReplica(1)")]);
    let names = |plan: &Plan| -> Vec<String> {
        let display = |it: &ir::plan::BufferData| {
            format!("{} {} {}", it.name, it.sharding.display(&plan.mesh), it.role.name())
        };
        plan.buffers.values().map(display).collect()
    };
    assert_eq!(names(&small), names(&large));
    assert_eq!(small.comms.values().collect::<Vec<_>>(), large.comms.values().collect::<Vec<_>>());
    for section in PlanSection::ALL {
        let (a, b) = (small.section(section), large.section(section));
        assert_eq!(a.len(), b.len(), "{}", section.name());
        for (i, (a, b)) in a.iter().zip(b).enumerate() {
            assert_eq!(without_sizes(a), without_sizes(b), "{}[{i}]", section.name());
        }
    }
}

/// An instruction without attributes that mention sizes.
fn without_sizes(instruction: &Instruction) -> Instruction {
    let mut res = instruction.clone();
    if let Instruction::Compute { op, .. } = &mut res {
        match op {
            ir::Op::Fill(it) => it.shape.clear(),
            ir::Op::EmbeddingGrad(it) => it.vocab = 0,
            _ => (),
        }
    }
    res
}

#[test]
fn plans_do_not_grow_with_the_mesh() {
    let source = example("llama3-405b");
    let size =
        |mesh: &str| print_plan(&compile(&source, mesh, &[("batch", "PerReplica(1)")])).len();
    let (small, large) = (size("2x8"), size("2048x8"));
    // Numbers have more or fewer digits; that is all.
    assert!(small.abs_diff(large) < small / 20, "{small} and {large} bytes");
}

const EXAMPLES: [(&str, &str); 7] = [
    ("mlp", "2x2"),
    ("llama-tiny", "2x4"),
    ("llama-tiny-fp8", "2x4"),
    ("gpt2-small", "2x4"),
    ("llama3-8b", "2x4"),
    ("llama3-70b", "8x8"),
    ("llama3-405b", "2048x8"),
];

#[test]
fn plans_of_all_examples_parse_back() {
    for (name, mesh) in EXAMPLES {
        let plan = compile(&example(name), mesh, &[]);
        let text = print_plan(&plan);
        let back = parse_plan(&text).unwrap_or_else(|it| panic!("{name}: {it}"));
        assert!(back == plan, "{name} on {mesh} differs after a round trip");
    }
}

#[test]
fn the_same_input_compiles_to_the_same_bytes() {
    for (name, mesh) in &EXAMPLES[..3] {
        let source = example(name);
        let text = || print_plan(&compile(&source, mesh, &[]));
        assert!(text() == text(), "{name} on {mesh}");
    }
}

/// GPT-2 computes in bf16 and reduces gradients in f32: the sum over dp is taken after widening.
#[test]
fn gradients_are_reduced_in_the_declared_type() {
    let set = [("precision.compute", "bf16"), ("precision.reduce", "f32")];
    let plan = compile(&example("llama-tiny"), "2x4", &set);
    let mut reduced = 0;
    for instruction in plan.section(PlanSection::Step) {
        let Instruction::Collective { kind, comm, parts, .. } = instruction else { continue };
        if kind.reduce().is_some() && plan.mesh.names(plan.comms[*comm]).starts_with("dp") {
            for part in parts {
                assert_eq!(
                    plan.buffers[part.src].ty.dtype,
                    ir::DType::F32,
                    "{}",
                    plan.buffers[part.src].name
                );
                reduced += 1;
            }
        }
    }
    assert!(reduced >= 21, "only {reduced} gradients are reduced over dp");
}

/// What enters a unit is kept: recomputing one layer never recomputes the layer before it.
#[test]
fn a_checkpointed_layer_is_recomputed_from_its_own_input() {
    let plan = compile(&example("llama3-8b"), "2x4", &[("checkpoint", "Full")]);
    let layer = |name: &str| -> Option<String> {
        let name = name.strip_suffix(".again")?;
        Some(name.strip_prefix("model.layers.")?.split('.').next()?.to_string())
    };
    let mut recomputed = 0;
    for instruction in plan.section(PlanSection::Step) {
        let layers = |buffers: ir::plan::Buffers| -> Vec<String> {
            buffers.iter().filter_map(|&it| layer(&plan.buffers[it].name)).collect()
        };
        for result in layers(instruction.writes()) {
            recomputed += 1;
            for operand in layers(instruction.reads()) {
                assert_eq!(result, operand, "{instruction:?}");
            }
        }
    }
    assert!(recomputed > 32 * 9, "{recomputed} values are made again");
    let kept = compile(&example("llama3-8b"), "2x4", &[]);
    println!(
        "temporaries of 8B on 2x4, GB: {:.1} kept, {:.1} recomputed",
        kept.step_bytes as f64 / 1e9,
        plan.step_bytes as f64 / 1e9
    );
    assert!(plan.step_bytes < kept.step_bytes);
}

/// Logits of one chunk are in memory at a time, on one rank and where the vocabulary is in shards; and
/// nothing more is sent but the statistics of the loss.
#[test]
fn a_loss_in_chunks_has_the_logits_of_one_in_memory() {
    let bytes_of_logits = |plan: &Plan| -> u64 {
        let spans = plan.spans(&[PlanSection::Step, PlanSection::Update]);
        let logits: Vec<(usize, usize, u64)> = plan
            .buffers
            .iter()
            .filter(|it| it.1.name.starts_with("lm_head.logits"))
            .filter_map(|it| spans[it.0].map(|(from, to)| (from, to, plan.local_bytes(it.0))))
            .collect();
        // One that is made in the place of another starts where that ends.
        let live = |at: usize| -> u64 {
            logits.iter().filter(|it| it.0 < at && at <= it.1).map(|it| it.2).sum()
        };
        logits.iter().map(|it| live(it.1)).max().unwrap()
    };
    let source = example("llama3-8b");
    for mesh in ["2x1", "2x4"] {
        let whole = compile(&source, mesh, &[]);
        let chunks = compile(&source, mesh, &[("layers[3].chunks", "8")]);
        assert_eq!(bytes_of_logits(&chunks), bytes_of_logits(&whole) / 8, "{mesh}");
        let big = |plan: &Plan| -> Vec<(String, &str, u64)> {
            let all = Summary::of(plan).collectives.into_iter();
            let big = all.filter(|it| it.kind != "all_reduce");
            big.map(|it| (it.axes, it.kind, it.wire_bytes)).collect()
        };
        assert_eq!(big(&chunks), big(&whole), "{mesh}");
    }
}

/// 32 layers and two passes over a mesh that shards heads and batch: 8 of 32 heads, one of two sequences.
#[test]
fn attentions_to_plan_ahead_are_listed_once() {
    let plan = compile(&example("llama3-8b"), "2x4", &[]);
    let found = runtime::backend::cuda::attention::attentions(&plan).unwrap();
    let sizes: Vec<_> = found
        .iter()
        .map(|it| (it.backward, it.batch, it.s, it.t, it.heads, it.kv_heads, it.d, it.causal))
        .collect();
    assert_eq!(sizes, [false, true].map(|it| (it, 1, 4096, 4096, 8, 2, 128, true)));
}

/// Llama-3-8B on 8 ranks in 4 micro-batches.
fn in_four(reduce: &str, set: &[(&str, &str)]) -> Plan {
    let four = [("micro_batches", "4"), ("batch", "PerReplica(4)"), ("reduce_gradients", reduce)];
    compile(&example("llama3-8b"), "8", &[&four[..], set].concat())
}

/// The sections of all collectives of one kind over one set of axes that move weights or gradients of weights.
fn sections_of(plan: &Plan, axes: &str, kind: &str) -> Vec<PlanSection> {
    let is_of_weight = |it: &ir::plan::Part| {
        let (src, dst) = (&plan.buffers[it.src], &plan.buffers[it.dst]);
        let is_weight = matches!(src.role, ir::plan::Role::Param | ir::plan::Role::State);
        is_weight || dst.name.contains(".weight.grad")
    };
    let found = plan.timeline(&PlanSection::ALL).filter(|it| match it.1 {
        Instruction::Collective { kind: of, comm, parts, .. } => {
            let axes_of = plan.mesh.names(plan.comms[*comm]);
            of.name() == kind && axes_of == axes && parts.iter().all(is_of_weight)
        }
        Instruction::Compute { .. }
        | Instruction::Copy { .. }
        | Instruction::Record { .. }
        | Instruction::Wait { .. } => false,
    });
    found.map(|it| it.0.0).collect()
}

fn predicted(plan: &Plan) -> ir::cost::Timeline {
    ir::cost::Timeline::predict(plan, &ir::cost::Target::builtin("h200").unwrap())
}

/// cosmos-framework#161: gradients that are reduced once a step overlap the last backward pass.
#[test]
fn gradients_that_are_reduced_once_are_reduced_beside_the_last_backward_pass() {
    let (every, last) = (in_four("EveryMicroBatch", &[]), in_four("LastMicroBatch", &[]));
    let found = sections_of(&last, "dp", "reduce_scatter");
    // One call for each layer, one for the head and the norm in front of it; ranks have the rows of the table that
    // they look up.
    assert!((33..=35).contains(&found.len()), "{} calls", found.len());
    assert!(found.iter().all(|it| *it == PlanSection::Last), "{found:?}");
    let seconds = [&every, &last].map(|it| predicted(it).step_seconds());
    println!("EveryMicroBatch {:.3} s, LastMicroBatch {:.3} s", seconds[0], seconds[1]);
    // Sums in f32 are read and written by every GEMM, and sent as such, where `EveryMicroBatch` sends bf16.
    assert!(seconds[1] < 1.03 * seconds[0], "{seconds:?}");
    // One sum in f32 as large as each gathered weight, instead of as large as its shard.
    let bytes = |it: &Plan| it.persistent_bytes + it.step_bytes;
    let sums = 4 * Summary::of(&last).parameters;
    let more = bytes(&last).saturating_sub(bytes(&every));
    assert!(more <= sums * 7 / 8 + (1 << 30), "{more} more bytes, with sums of {sums}");
}

/// The sums of all micro-batches are reduced over replicas unit by unit, beside the last backward pass.
#[test]
fn replicas_are_reduced_beside_the_last_backward_pass() {
    for reduce in ["EveryMicroBatch", "LastMicroBatch"] {
        let set =
            [("micro_batches", "2"), ("batch", "PerReplica(2)"), ("reduce_gradients", reduce)];
        let plan = compile(&example("llama3-8b"), "dp_replicate=8,dp_shard=8,tp=1", &set);
        let found = sections_of(&plan, "dp_replicate", "all_reduce");
        assert!((1..=35).contains(&found.len()), "{reduce}: {} calls", found.len());
        assert!(found.iter().all(|it| *it == PlanSection::Last), "{reduce}: {found:?}");
        let exposed = predicted(&plan).exposed_seconds();
        println!("{reduce}: {exposed:.3} s exposed");
    }
}

#[test]
fn weights_that_are_kept_are_gathered_once_a_step() {
    for reduce in ["EveryMicroBatch", "LastMicroBatch"] {
        let plan = in_four(reduce, &[("fsdp.reshard_after_forward", "false")]);
        let found = sections_of(&plan, "dp", "all_gather");
        // Ranks look up the rows of the table that they have.
        assert_eq!(found, [PlanSection::First; 33], "{reduce}");
        let again = in_four(reduce, &[]);
        assert!(wire_gb(&Summary::of(&plan)) < wire_gb(&Summary::of(&again)));
    }
}

/// A GEMM adds its gradient to the sum of micro-batches; the first micro-batch writes it.
#[test]
fn sums_of_micro_batches_are_made_by_gemms() {
    let plan = in_four("LastMicroBatch", &[]);
    let adds = |section: PlanSection| -> Vec<&str> {
        let found = plan.section(section).iter().filter_map(|it| match it {
            Instruction::Compute { op: ir::Op::Add(_), results, .. } => Some(results[0]),
            Instruction::Compute { .. }
            | Instruction::Collective { .. }
            | Instruction::Copy { .. }
            | Instruction::Record { .. }
            | Instruction::Wait { .. } => None,
        });
        let large = found.filter(|it| plan.local_bytes(*it) > 1 << 20);
        large.map(|it| &*plan.buffers[it].name).collect()
    };
    assert_eq!(adds(PlanSection::First), [""; 0]);
    for section in [PlanSection::Step, PlanSection::Last] {
        // Nothing multiplies to make this gradient.
        assert_eq!(adds(section), ["model.embed_tokens.weight.grad.f32.acc"]);
    }
}

/// A sweep prints figures of the plan that `compile` makes.
#[test]
fn a_priced_plan_is_the_compiled_one() {
    for (name, mesh) in [("mlp", "2x4"), ("llama-tiny", "2x2x2"), ("llama-tiny-block", "2x2")] {
        let model = ir::model::parse(&example(name)).unwrap();
        let graph = ir::model::elaborate(&model, &MeshSpec::parse(mesh).unwrap()).unwrap();
        let options = codegen::Options::default();
        let priced = codegen::price(graph.clone(), &options, u64::MAX).unwrap().unwrap();
        let compiled = codegen::compile(graph.clone(), &options).unwrap().plan.into_plan();
        assert!(priced == Plan { model: None, ..compiled }, "{name} on {mesh}");
        assert_eq!(codegen::price(graph, &options, 0).unwrap(), None, "{name} needs some memory");
    }
}
