//! Round trips, errors, and text that is no program.

use cranelift_entity::{EntityRef, PrimaryMap};
use proptest::prelude::*;
use smallvec::SmallVec;

use super::*;
use crate::graph::{
    AfterForward, Checkpoint, Def, Init, NewNode, Optimizer, Param, Reduction, Scope, ScopeData,
    Store, Training,
};
use crate::ops::{Add, Cast, Collective, CollectiveKind, Fill, Matmul, Number, OpKind, Reshard};
use crate::placement::{AxisSet, Mesh, ReduceOp, Sharding};
use crate::plan::{
    Buffer, BufferData, Comm, Event, Instruction, Part, PlanParam, PlanSection, Role, StreamKind,
};
use crate::quant::{
    Custom, DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format, MXFP8BlockScaling,
    QuantSpec, Recipe, Scaling,
};
use crate::run::{Decay, Run, Schedule};
use crate::{Builder, DType, Op, TensorType, Value};

fn mesh() -> Mesh {
    Mesh::new(&[("dp", 2), ("tp", 4)]).refine("tp", 2, "tp_kv", "tp_rep").unwrap()
}

/// A graph that uses every part of the syntax.
fn full_graph(phase: Phase) -> Graph {
    let mut graph = Graph::new("llama", mesh());
    graph.phase = phase;
    graph.micro_batches = 4;
    graph.weight_mesh = Some(graph.mesh.axis_set(&["tp"]).unwrap());
    graph.training = Training {
        optimizer: Optimizer::AdamW { betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1 },
        clip_norm: Some(1.0),
        reduce: Reduction::LastMicroBatch,
    };
    graph.run.schedule =
        Schedule { lr: 3e-4, warmup: 100, decay: Decay::Cosine { until: 1000, min: 1e-5 } };
    let root = Scope::new(0);
    graph.scopes[root].after_forward = AfterForward::Drop;
    let layer = graph.scopes.push(ScopeData {
        path: "model.layers.0".into(),
        parent: Some(root),
        unit: 1,
        layer: Some(0),
        checkpoint: Checkpoint::Selective(vec!["matmul".into(), "odd \"name\"\n".into()]),
        after_forward: AfterForward::KeepPiece(mesh().axis_set(&["dp"]).unwrap()),
        weight_mesh: None,
        recipe: Recipe::MXFP8BlockScaling(MXFP8BlockScaling::default()),
    });
    let scaling = Scaling::Current { pow2: true, epsilon: Number(1e-6) };
    let input = Some(QuantSpec { format: Format::E4M3, scaling });
    let custom = Recipe::Custom(Custom { input, ..Custom::default() });
    let mlp = graph.scopes.push(ScopeData {
        path: "model.layers.0.mlp".into(),
        parent: Some(layer),
        unit: 1,
        layer: None,
        checkpoint: Checkpoint::Full,
        after_forward: AfterForward::Keep,
        weight_mesh: Some(mesh().all()),
        recipe: custom,
    });
    graph.scopes.push(ScopeData { path: "orphan".into(), ..ScopeData::default() });
    let at = |text: &str| Sharding::parse(text, &mesh()).unwrap();
    let ty = |shape: &[u64]| TensorType::new(DType::F32, shape);
    let mut builder = Builder::new(&mut graph);
    let w = builder.leaf("model.layers.0.mlp.up_proj.weight", ty(&[64, 32]), Def::Param);
    builder.pin(w, at("[tp.dp, _]"));
    let bare = builder.leaf("bare", ty(&[3]), Def::Param);
    builder.pin(bare, at("[x3.tp_kv]"));
    let odd = builder.leaf("odd \"name\" \\ \n é%", ty(&[]), Def::State);
    builder.pin(odd, at("[]"));
    let x = builder.leaf("x[0]/y-z", ty(&[8, 16, 32]), Def::Input);
    builder.pin(x, at("[dp, _, _]"));
    builder.section = Section::Prepare;
    builder.scope = layer;
    let w16 = builder.op("w.bf16", Cast { to: DType::Bf16 }, &[w]).unwrap();
    builder.section = Section::Forward;
    builder.scope = mlp;
    let gather = Collective { kind: CollectiveKind::AllGather, axes: AxisSet(1) };
    let both = builder.ops(&["w.full", "w16.full"], gather, &[w, w16]).unwrap();
    for (&value, to) in both.iter().zip(["[tp, _]", "[tp_kv, _]"]) {
        builder.graph.values[value].sharding = Some(at(to));
    }
    let h =
        builder.op("h", Matmul { transpose_b: true, ..Matmul::default() }, &[x, both[0]]).unwrap();
    builder.graph.values[h].sharding = Some(at("[_, _, tp] sum(dp)"));
    let unused = builder.op("unused", Add {}, &[h, h]).unwrap();
    builder.section = Section::Backward;
    builder.scope = root;
    let scatter =
        Collective { kind: CollectiveKind::ReduceScatter(ReduceOp::Sum), axes: AxisSet(0b110) };
    let g = builder.op("w.grad", scatter, &[both[0]]).unwrap();
    builder.graph.values[g].like = Some(w);
    builder.section = Section::Update;
    let zero = builder.op("zero", Fill::new(-0.0, &ty(&[])), &[]).unwrap();
    let reshard = Reshard { reduce: Some(DType::F32) };
    let moved = builder.op("zero", reshard, &[zero]).unwrap();
    // A node that a pass dropped, and a value that pointed at it.
    graph.order.retain(|&it| graph.nodes[it].results[0] != unused);
    graph.values[g].like = Some(unused);
    graph.values[h].like = Some(x);
    let param = Param {
        value: w,
        compute: w16,
        full: both[1],
        label: None,
        init: Init::Normal { mean: 0.0, std: 0.02 },
        decay: true,
        trainable: true,
        placed: true,
        reduce_dtype: DType::Bf16,
        scope: mlp,
        aliases: vec!["lm_head.weight".into(), "a b".into()],
        grad: Some(g),
    };
    let frozen = Param {
        value: graph.add_leaf("frozen".into(), ty(&[8]), Def::Param),
        init: Init::Uniform { low: -1.0, high: 1e-3 },
        decay: false,
        trainable: false,
        placed: false,
        aliases: vec![],
        grad: None,
        ..param.clone()
    };
    graph.params =
        vec![Param { compute: frozen.value, full: unused, scope: root, ..frozen }, param];
    graph.stores = vec![
        Store { state: odd, value: moved, section: Section::Update },
        Store { state: odd, value: zero, section: Section::Prepare },
    ];
    graph.results = vec![("loss".into(), moved), ("grad norm".into(), zero)];
    graph
}

/// What is live in a graph, in one comparable form that does not go through the printer.
fn structure(graph: &Graph) -> Vec<String> {
    let is_live = |value: Value| match graph.values[value].def {
        Def::Input | Def::Param | Def::State | Def::Sum => true,
        Def::Result { node, .. } => graph.order.contains(&node),
    };
    let name = |value: Value| graph.values[value].name.clone();
    let value = |value: Value| {
        let it = &graph.values[value];
        let like = it.like.filter(|&it| is_live(it)).map(name);
        let index = match it.def {
            Def::Result { node, index } => {
                Some((graph.order.iter().position(|&it| it == node), index))
            }
            Def::Input | Def::Param | Def::State | Def::Sum => None,
        };
        format!("{} {:?} {:?} {} {like:?} {index:?}", it.name, it.ty, it.sharding, it.pinned)
    };
    let names = |values: &[Value]| values.iter().map(|&it| name(it)).collect::<Vec<_>>();
    let mut res = vec![
        format!("{} {:?} {:?}", graph.name, graph.mesh, graph.weight_mesh),
        format!("{:?} {} {:?}", graph.phase, graph.micro_batches, graph.training),
        format!("{:?} {:?}", graph.run, graph.scopes),
    ];
    let mut leaves: Vec<String> = graph
        .values
        .iter()
        .filter(|it| !matches!(it.1.def, Def::Result { .. }))
        .map(|it| format!("{:?} {}", it.1.def, value(it.0)))
        .collect();
    leaves.sort();
    res.extend(leaves);
    for &node in &graph.order {
        let it = &graph.nodes[node];
        let results: Vec<String> = it.results.iter().map(|&it| value(it)).collect();
        let inputs = names(&it.inputs);
        res.push(format!("{:?} {inputs:?} {results:?} {:?} {:?}", it.op, it.section, it.scope));
    }
    for it in &graph.params {
        let compute = if is_live(it.compute) { it.compute } else { it.value };
        let full = if is_live(it.full) { it.full } else { compute };
        let grad = it.grad.filter(|&it| is_live(it)).map(name);
        res.push(format!("{:?} {grad:?}", names(&[it.value, compute, full])));
        res.push(format!("{:?} {} {} {}", it.init, it.decay, it.trainable, it.placed));
        res.push(it.reduce_dtype.to_string());
        res.push(format!("{:?} {:?}", it.scope, it.aliases));
    }
    for it in &graph.stores {
        res.push(format!("{:?} {:?}", names(&[it.state, it.value]), it.section));
    }
    res.extend(graph.results.iter().map(|it| format!("{} {}", it.0, name(it.1))));
    res
}

#[track_caller]
fn check_graph(graph: &Graph) {
    let text = print_graph(graph);
    let again = parse_graph(&text).unwrap_or_else(|it| panic!("{it}\n{text}"));
    assert_eq!(structure(graph), structure(&again), "{text}");
    assert_eq!(text, print_graph(&again));
}

#[track_caller]
fn check_plan(plan: &Plan) {
    let text = print_plan(plan);
    let again = parse_plan(&text).unwrap_or_else(|it| panic!("{it}\n{text}"));
    assert_eq!(*plan, again, "{text}");
    assert_eq!(text, print_plan(&again));
}

/// A plan that uses every part of the syntax.
fn full_plan(phase: Phase) -> Plan {
    let mesh = mesh();
    let at = |text: &str| Sharding::parse(text, &mesh).unwrap();
    let mut buffers = PrimaryMap::new();
    let mut buffer = |name: &str, shape: &[u64], sharding: &str, role, offset| {
        let ty = TensorType::new(DType::F32, shape);
        let offset = if phase == Phase::Planned { Some(offset) } else { None };
        buffers.push(BufferData { name: name.into(), ty, sharding: at(sharding), role, offset })
    };
    let w = buffer("w.weight", &[64, 32], "[tp.dp, _]", Role::Param, 0);
    let x = buffer("x", &[8, 32], "[dp, _]", Role::Input, 1024);
    let full = buffer("w.full", &[64, 32], "[tp, _]", Role::Temp, 0);
    let again = buffer("w.full", &[64, 32], "[tp, _]", Role::Temp, 2048);
    let h = buffer("h h", &[8, 64], "[dp, tp]", Role::Temp, 4096);
    let loss = buffer("loss", &[], "[]", Role::Carried, 1536);
    let m = buffer("w.m", &[5], "[tp]", Role::State, 1540);
    let mut comms = PrimaryMap::new();
    let dp = comms.push(AxisSet(0b001));
    let tp = comms.push(AxisSet(0b110));
    let mut streams = PrimaryMap::new();
    let compute = streams.push(StreamKind::Compute.into());
    let comm = streams.push(StreamKind::Comm.into());
    let event = Event::new(2);
    let part = |src: Buffer, dst: Buffer| Part { src, dst, adds: false };
    let collective = |kind, on: Comm, parts: &[Part]| Instruction::Collective {
        kind,
        comm: on,
        parts: SmallVec::from_slice(parts),
        stream: comm,
    };
    let op = |op: Op, args: &[Buffer], results: &[Buffer]| Instruction::Compute {
        op,
        args: SmallVec::from_slice(args),
        results: SmallVec::from_slice(results),
        stream: compute,
    };
    let sum = CollectiveKind::AllReduce(ReduceOp::Max);
    let step = vec![
        collective(CollectiveKind::AllGather, dp, &[part(w, full), part(w, again)]),
        Instruction::Record { event, stream: comm },
        Instruction::Wait { event, stream: compute },
        op(Matmul { transpose_b: true, ..Matmul::default() }.into(), &[x, again], &[h]),
        collective(sum, tp, &[part(h, h)]),
        collective(CollectiveKind::Slice, tp, &[part(again, full)]),
        Instruction::Copy { src: full, dst: again, stream: compute },
    ];
    let fill = Fill { value: 0.5.into(), dtype: DType::F32, shape: vec![] };
    Plan {
        name: "llama 8b".into(),
        mesh: mesh.clone(),
        phase,
        micro_batches: 2,
        comms,
        streams,
        events: 3,
        buffers,
        sections: [vec![], vec![], step, vec![], vec![op(fill.into(), &[], &[loss])]],
        persistent_bytes: 1552,
        model: None,
        step_bytes: 8192,
        params: vec![
            PlanParam { buffer: w, label: None, init: Init::Ones, aliases: vec!["head".into()] },
            PlanParam { buffer: m, label: None, init: Init::Zeros, aliases: vec![] },
        ],
        results: vec![("loss".into(), loss)],
        run: Run { steps: 20, ..Run::default() },
    }
}

#[test]
fn graphs_round_trip_in_each_phase() {
    for &(phase, _) in &PHASES[..4] {
        check_graph(&full_graph(phase));
        check_graph(&Graph { phase, ..Graph::new("empty", Mesh::default()) });
    }
}

#[test]
fn plans_round_trip_in_each_phase() {
    for &(phase, _) in &PHASES[4..] {
        check_plan(&full_plan(phase));
    }
}

#[test]
fn spelling_of_phases_and_sections_is_by_index() {
    assert!(PHASES.iter().enumerate().all(|(i, it)| it.0 as usize == i));
    assert!(SECTIONS.iter().enumerate().all(|(i, it)| it.0 as usize == i));
}

#[test]
fn no_op_is_spelt_like_a_collective_or_a_statement() {
    let taken = [
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "all_to_all",
        "permute",
        "slice",
        "to_partial",
        "copy",
        "record",
        "wait",
    ];
    assert!(OpKind::ALL.iter().all(|it| !taken.contains(&it.name())));
}

#[test]
fn every_sample_op_round_trips() {
    for sample in OpKind::ALL.iter().flat_map(|it| it.samples()) {
        let mut graph = Graph::new("sample", Mesh::default());
        let mut builder = Builder::new(&mut graph);
        let inputs: Vec<Value> =
            sample.inputs.iter().map(|it| builder.leaf("in", it.ty.clone(), Def::Input)).collect();
        let types: Vec<&TensorType> = sample.inputs.iter().map(|it| &it.ty).collect();
        let n = sample.op.infer(&types).unwrap().len();
        builder.ops(&vec!["out"; n], sample.op.clone(), &inputs).unwrap();
        check_graph(&graph);
    }
}

#[test]
fn a_printed_plan_reads_like_this() {
    let text = print_plan(&full_plan(Phase::Planned));
    let wanted = r#"plan @"llama 8b" phase=planned mesh=(dp=2, tp_kv=2 of tp, tp_rep=2 of tp) micro_batches=2 persistent_bytes=1552 step_bytes=8192 events=3 {
  run (steps:20,seed:0,global_batch:1,sequence:1,vocab:1,ignore_index:-100,schedule:(lr:0.001,warmup:0,decay:Constant))
  comm c0 = (dp)
  comm c1 = (tp_kv, tp_rep)
  stream s0 = compute
  stream s1 = comm
  buffer %w.weight : f32[64, 32] @ [tp_kv.tp_rep.dp, _] param at 0  ; [8, 32]
  buffer %x : f32[8, 32] @ [dp, _] input at 1024  ; [4, 32]
  buffer %w.full : f32[64, 32] @ [tp_kv.tp_rep, _] temp at 0  ; [16, 32]
  buffer %w.full : f32[64, 32] @ [tp_kv.tp_rep, _] temp at 2048  ; [16, 32]
  buffer %"h h" : f32[8, 64] @ [dp, tp_kv.tp_rep] temp at 4096  ; [4, 16]
  buffer %loss : f32[] @ [] carried at 1536
  buffer %w.m : f32[5] @ [tp_kv.tp_rep] state at 1540  ; [2]
  param %w.weight init=Ones aliases=(%head)
  param %w.m
  step:
  s1: %w.full, %w.full#2 = all_gather %w.weight, %w.weight on c0
  s1: record e2
  s0: wait e2
  s0: %"h h" = matmul(transpose_b:true) %x, %w.full#2
  s1: %"h h" = all_reduce(max) %"h h" on c1
  s1: %w.full = slice %w.full#2 on c1
  s0: %w.full#2 = copy %w.full
  update:
  s0: %loss = fill(value:0.5,dtype:f32,shape:[])
  result loss = %loss
}
"#;
    assert_eq!(text, wanted);
}

/// Puts `text` into a small program and says where (as the text there) and why it is refused.
#[track_caller]
fn check_error(text: &str, at: &str, message: &str) {
    let Err(error) = parse(text) else { panic!("this is a program:\n{text}") };
    assert_eq!((&text[error.span.clone()], error.message.as_str()), (at, message), "{text}");
    let line = text.lines().nth(error.line as usize - 1).unwrap_or_default();
    let rest: String = line.chars().skip(error.column as usize - 1).collect();
    assert!(at == "\n" || rest.starts_with(at), "{error}");
}

#[test]
fn errors_say_where_and_what_was_expected() {
    let graph = |body: &str| format!("graph @g phase=sharded mesh=(dp=2, tp=4) {{\n{body}\n}}\n");
    let plan = |body: &str| {
        format!(
            "plan @p phase=planned mesh=(dp=2) step_bytes=64 events=1 {{\ncomm c0 = (dp)\n\
             stream s0 = compute\nbuffer %x : f32[4] @ [dp] temp at 0\nstep:\n{body}\n}}\n"
        )
    };
    check_error("model", "model", "expected `graph` or `plan`, found `model`");
    check_error(
        "graph @g phase=planned mesh=() {\n}\n",
        "planned",
        "expected one of the phases logical, sharded, explicit, local, found `planned`",
    );
    check_error("graph @g mesh=() {\n}\n", "{", "`phase=` is missing before the `{`");
    let twice = "body @a (f32) {\n%1 = add %0\nreturn %1\n}\n".repeat(2);
    check_error(&graph(&twice), "@a", "there is a body `@a` already");
    check_error(
        &graph("forward:\n%y = @a %x : f32[]"),
        "@a",
        "unknown body `@a`: it is declared before it is used",
    );
    check_error(
        &plan("body @a (f32) {\n%2 = add %0\nreturn %2\n}"),
        "%2",
        "values are numbered in order: the next one is `%1`",
    );
    check_error(
        &graph("body @a (f32) {\n%1 = add %1\nreturn %1\n}"),
        "(f32)",
        "`%1` is not made before it is read",
    );
    check_error(&graph("body @a (f32) {\n%1 = add %0"), "}", "expected `%`, found `}`");
    check_error("graph @g phase=local events=1", "events", "unknown property `events`");
    check_error(
        "graph @g phase=local mesh=(dp=0) {\n}\n",
        "(dp=0)",
        "mesh axis `dp` of size 0: an axis needs at least one coordinate",
    );
    check_error(
        "plan @g phase=planned mesh=(a=4000000000, b=4000000000, c=4000000000) {\n}\n",
        "(a=4000000000, b=4000000000, c=4000000000)",
        "mesh axis `a` of size 4000000000: with it the mesh has more than 2^20 ranks, the most that planc plans \
         for; use smaller axes",
    );
    check_error(
        &graph("input %x : f16[4] @ [dp]"),
        "f16",
        "unknown dtype `f16`; one of f32, bf16, i32, e4m3, e5m2",
    );
    check_error(
        &graph("input %x : f32[4294967296, 4294967296]"),
        "f32[4294967296, 4294967296]",
        "the tensor has more than 2^46 elements",
    );
    check_error(
        &graph("input %x : f32[99999999999999999999]"),
        "99999999999999999999",
        "99999999999999999999 is too large",
    );
    check_error(
        &graph("input %x : f32[4] @ [pp]"),
        "[pp]",
        "the mesh has no axis `pp`; its axes are dp, tp",
    );
    check_error(
        &graph("input %x : f32[4] @ [dp, _]"),
        "[dp, _]",
        "the layout has 2 dimensions and the tensor has 1; write one entry per dimension",
    );
    check_error(
        &graph("input %x : f32[4]\ninput %x : f32[4]"),
        "%x",
        "there is a value `%x` already",
    );
    check_error(
        &graph("input %x : f32[4]\nforward:\n%y = add %x, %z : f32[4]"),
        "%z",
        "unknown value `%z`",
    );
    check_error(
        &graph("input %x : f32[4]\n%y = add %x : f32[4]"),
        "%y",
        "a node needs a section above it, such as `forward:`",
    );
    check_error(
        &graph("input %x : f32[4]\nforward:\n%y = ad %x : f32[4]"),
        "ad",
        "unknown op `ad`",
    );
    check_error(
        &graph("forward:\n%y, %z = fill(value:0.0,dtype:f32,shape:[]) : f32[]"),
        "\n",
        "expected `,` and a type: there are 2 results, found the end of the line",
    );
    check_error(
        &graph("input %x : f32[4]\nforward:\n%y, %z = all_gather(dp) %x : f32[4], f32[4]"),
        "%y",
        "1 operands and 2 results",
    );
    check_error(
        &graph("input %x : f32[4]\nforward:\n%y = reduce_scatter(dp) %x : f32[4]"),
        "dp",
        "expected sum, avg, max or min, found `dp`",
    );
    check_error(
        &graph("forward:\n%y = collective(kind:all_gather,axes:(9)) : f32[4]"),
        "collective(kind:all_gather,axes:(9))",
        "a collective goes by its kind, such as `all_gather(dp)`",
    );
    check_error(
        &graph("forward:\n%y = fill(value:0.0 : f32[4]"),
        "(",
        "`(` is not closed on its line",
    );
    check_error(&graph("input %x : f32[4] in 3"), "in", "expected the end of the line, found `in`");
    check_error(&graph("param %x : f32[4] in 3"), "3", "there is no scope 3");
    check_error(&graph("scope 2 \"a\""), "2", "the next scope must be number 1");
    check_error(
        &graph("scope 1 \"a\" recipe=DelayedScaling(margin:-1)"),
        "DelayedScaling(margin:-1)",
        "margin is -1, and must be from 0 to 17",
    );
    check_error(
        &graph("run (steps:1)\nrun (steps:1)"),
        "(steps:1)",
        concat!(
            "`(steps:1)` is not data and schedule: ",
            "Unexpected missing field named `seed` in `Run`",
        ),
    );
    check_error(&plan("s1: record e0"), "s1", "`s1` is not declared");
    check_error(&plan("s0: record e1"), "e1", "`e1` is not declared");
    check_error(&plan("s0: %y = copy %x"), "%y", "unknown buffer `%y`");
    check_error(&plan("s0: %x = copy %x#2"), "%x#2", "unknown buffer `%x#2`");
    check_error(&plan("s0: %x, %x = copy %x"), "%x, %x", "a copy of 1 buffers has 2 results");
    check_error(
        &plan("s0: %x = all_gather %x"),
        "\n",
        "expected `on` and a communicator, found the end of the line",
    );
    check_error(&plan("s0: %x = all_gather %x on c1"), "c1", "`c1` is not declared");
    check_error(&plan("step:"), "step", "`step` is here twice");
    check_error(
        &plan("buffer %y : f32[32] @ [dp] temp at 4"),
        "4",
        "64 bytes at 4 do not fit the step arena of 64 bytes",
    );
    check_error(
        &(plan("s0: record e0") + "x"),
        "x",
        "expected nothing after the closing `}`, found `x`",
    );
}

#[test]
fn a_truncated_file_is_refused_as_such() {
    for text in [print_plan(&full_plan(Phase::Planned)), print_graph(&full_graph(Phase::Local))] {
        let end = text.trim_end().len();
        for cut in (0..end).filter(|&it| text.is_char_boundary(it)) {
            let Err(error) = parse(&text[..cut]) else { panic!("{}", &text[..cut]) };
            assert!(error.span.start <= error.span.end && error.span.end <= cut, "{error}");
            // A cut inside a word is a misspelt word; any other is recognised for what it is.
            if text[..cut].ends_with('\n') {
                let (message, end) = (&error.message, "the file is truncated");
                assert!(message.starts_with("unexpected end") && message.ends_with(end), "{error}");
            }
        }
    }
}

#[test]
fn large_plans_print_and_parse_in_linear_time() {
    let mut plan = full_plan(Phase::Planned);
    let at = PlanSection::Step as usize;
    let step = plan.sections[at].clone();
    plan.sections[at] = step.iter().cycle().take(20_000).cloned().collect();
    check_plan(&plan);
}

/// One node: which op, which operands (counted from the last value), which sharding, which flags.
type Pick = (u8, [prop::sample::Index; 3], u8, u8);

fn picks() -> impl Strategy<Value = Vec<Pick>> {
    proptest::collection::vec(any::<Pick>(), 0..24)
}

/// Any graph over square matrices: every op fits every value.
fn random_graph(picks: &[Pick], phase: u8) -> Graph {
    let mut graph = Graph::new("random", mesh());
    graph.phase = PHASES[phase as usize % 4].0;
    let recipe = match phase / 4 % 4 {
        0 => Recipe::Bf16,
        1 => Recipe::Float8CurrentScaling(Float8CurrentScaling::default()),
        2 => Recipe::Float8BlockScaling(Float8BlockScaling {
            use_f32_scales: true,
            ..Float8BlockScaling::default()
        }),
        _ => Recipe::DelayedScaling(DelayedScaling {
            amax_history_len: 1 + u32::from(phase),
            ..DelayedScaling::default()
        }),
    };
    let path = "child".to_string();
    let child = graph.scopes.push(ScopeData { path, recipe, ..ScopeData::default() });
    let ty = TensorType::new(DType::F32, &[8, 8]);
    let first = graph.add_leaf("x".into(), ty.clone(), Def::Input);
    let mut values = vec![first];
    let layouts =
        ["[_, _]", "[dp, _]", "[tp, _] sum(dp)", "[dp, x2.tp_kv]", "[_, tp_kv] max(dp, tp_rep)"];
    let mut sections: Vec<u8> = picks.iter().map(|it| it.3 >> 4 & 3).collect();
    sections.sort_unstable();
    for (&(op, operands, layout, flags), section) in picks.iter().zip(sections) {
        let section = SECTIONS[section as usize].0;
        let scope = if flags & 1 == 0 { Scope::new(0) } else { child };
        let axes = AxisSet(u16::from(layout >> 3 & 7));
        let inputs = operands.map(|it| *it.get(&values));
        let (op, n): (Op, usize) = match op % 8 {
            0 => (Add {}.into(), 3),
            1 => (Cast { to: DType::ALL[layout as usize % DType::ALL.len()] }.into(), 1),
            2 => (Fill::new(f64::from(flags) / 3.0, &ty).into(), 0),
            3 => (Matmul { transpose_a: flags & 2 != 0, ..Matmul::default() }.into(), 2),
            4 => (Reshard { reduce: (flags & 2 != 0).then_some(DType::Bf16) }.into(), 1),
            5 => (Collective { kind: CollectiveKind::AllGather, axes }.into(), 3),
            6 => {
                let op = ReduceOp::ALL[flags as usize % 4];
                (Collective { kind: CollectiveKind::ReduceScatter(op), axes }.into(), 2)
            }
            _ => (Collective { kind: CollectiveKind::Slice, axes }.into(), 1),
        };
        let n_results = if matches!(op, Op::Collective(_)) { n } else { 1 };
        let results: Vec<_> =
            (0..n_results).map(|it| (format!("v{}.{it}", values.len()), ty.clone())).collect();
        let node =
            graph.add_node(NewNode { op, inputs: &inputs[..n], results: &results, section, scope });
        for value in graph.nodes[node].results.clone() {
            let data = &mut graph.values[value];
            data.pinned = flags & 4 != 0;
            data.like = (flags & 8 != 0).then_some(inputs[0]);
            if flags & 128 == 0 {
                let text = layouts[layout as usize % layouts.len()];
                data.sharding = Some(Sharding::parse(text, &mesh()).unwrap());
            }
            values.push(value);
        }
        // Some nodes are dead.
        if flags & 64 == 0 {
            graph.order.push(node);
        } else {
            values.truncate(values.len() - n_results);
        }
    }
    let last = values[values.len() - 1];
    graph.results.push(("loss".into(), last));
    graph.stores.push(Store { state: first, value: last, section: Section::Backward });
    graph
}

/// Replaces, drops or repeats a few bytes of a text, or swaps in another token.
fn mutated(text: &str, edits: &[(prop::sample::Index, u8, char)]) -> String {
    let tokens =
        ["%", "\"", "(", "[", "}", "\n", ";", "99999999999", "@", "\\", "é", "=", ":", ","];
    let mut chars: Vec<char> = text.chars().collect();
    for &(at, what, with) in edits {
        let at = at.index(chars.len());
        match what % 5 {
            0 => chars[at] = with,
            1 => {
                chars.drain(at..(at + what as usize / 5).min(chars.len()).max(at + 1));
            }
            2 => {
                let copy: Vec<char> = chars[at..].iter().take(what as usize).copied().collect();
                chars.splice(at..at, copy);
            }
            3 => {
                let token = tokens[what as usize % tokens.len()];
                chars.splice(at..at, token.chars());
            }
            _ => chars.truncate(at.max(1)),
        }
    }
    chars.into_iter().collect()
}

proptest! {
    #[test]
    fn random_graphs_round_trip(picks in picks(), phase in any::<u8>()) {
        check_graph(&random_graph(&picks, phase));
    }

    #[test]
    fn no_text_panics(
        edits in proptest::collection::vec(any::<(prop::sample::Index, u8, char)>(), 1..4),
        is_plan in any::<bool>(),
    ) {
        let text = match is_plan {
            true => print_plan(&full_plan(Phase::Planned)),
            false => print_graph(&full_graph(Phase::Local)),
        };
        let text = mutated(&text, &edits);
        match parse(&text) {
            // What is still a program has a text form of its own.
            Ok(program) => {
                let printed = program.to_string();
                prop_assert_eq!(parse(&printed).unwrap().to_string(), printed);
            }
            Err(error) => prop_assert!(text.get(error.span.clone()).is_some(), "{}", error),
        }
    }

    #[test]
    fn names_round_trip(name in any::<String>()) {
        let mut graph = Graph::new(&name, Mesh::default());
        let value = graph.add_leaf(name.clone(), TensorType::scalar(DType::I32), Def::State);
        graph.results.push((name.clone(), value));
        graph.scopes[Scope::new(0)].path = name;
        check_graph(&graph);
    }
}
