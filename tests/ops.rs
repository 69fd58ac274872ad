//! The tests that every op gets, from its samples; then known values, and reports about ops.

use std::collections::BTreeMap;

use half::bf16;

use ir::ops::{
    Activation, ActivationKind, Adam, AdamW, Amax, Amaxes, Assignment, Attention, AttentionGrad,
    BiasAdd, CeLoss, CeMax, CeStats, ClipScale, Codes, Conflict, Copies, Dropout, Embedding, Fused,
    GradError, Granule, LayerNorm, Llama3Scaling, LocalCx, Matmul, Number, Op, OpKind, Origin,
    QuantMatmul, Quantize, RmsNorm, Rope, Sample, SampleInput, Sgd, SplitDim, StandsFor, Tensor,
    Values, Watch,
};
use ir::placement::{Mesh, ReduceOp, Sharding};
use ir::random::stream_key;
use ir::{Builder, DType, TensorType, Value};
use tests::eval::{Env, apply, backward, empty_graph, eval, leaf, random, tensor};
use tests::spmd::{Case, over};

/// Step of central differences.
const STEP: f64 = 1e-5;

/// By how much a central difference may miss, relative to numbers of order one. The formula is off
/// by `STEP^2 / 6` times a third derivative (of order one hundred at most), 2e-9; and a sum `f` of
/// order ten is off by 10 * 2^-53, so that the quotient is off by 10 * 2^-53 / STEP = 1e-10.
const DIFFERENCE_TOLERANCE: f64 = 1e-8;

/// By how much a reference in f32 may differ from that in f64, relative to numbers of order one:
/// sums of up to fifty products, each with an error of 2^-24, and an exponential of the sum.
const F32_TOLERANCE: f64 = 1e-5;

/// By how much a known value, printed with 16 digits, may differ.
const KNOWN_TOLERANCE: f64 = 1e-14;

fn samples() -> impl Iterator<Item = Sample> {
    OpKind::ALL.iter().flat_map(|it| it.samples())
}

fn operands(sample: &Sample) -> Vec<Tensor<f64>> {
    sample.inputs.iter().enumerate().map(|(i, it)| random(it, i as u64)).collect()
}

fn types(sample: &Sample) -> Vec<TensorType> {
    sample.inputs.iter().map(|it| it.ty.clone()).collect()
}

/// Whether the op of a sample has a gradient.
fn has_gradient(sample: &Sample) -> bool {
    gradients(sample, &weights(sample)).is_ok_and(|it| it.grads.iter().any(Option::is_some))
}

/// What a model may have has a gradient, but what its op says has none.
#[test]
fn ops_of_models_are_differentiable() {
    for kind in OpKind::ALL.iter().filter(|it| it.origins().contains(&Origin::Model)) {
        for sample in kind.samples().iter().filter(|it| !it.op.is_fused()) {
            let no_result = weights(sample).iter().all(Option::is_none);
            assert!(no_result || has_gradient(sample), "{}", sample.op.to_text());
        }
    }
}

#[test]
fn every_op_has_samples() {
    for &kind in OpKind::ALL {
        let settled = kind == OpKind::Collective;
        assert!(settled || !kind.samples().is_empty(), "{} has no samples", kind.name());
    }
}

/// An op outside a model's forward pass stands for no op of the model, unless a recipe put it there.
#[test]
fn ops_that_stand_for_others_come_from_recipes() {
    for &kind in OpKind::ALL {
        let (name, origins) = (kind.name(), kind.origins());
        assert_eq!(origins == [Origin::Gradient], name.ends_with("_grad"), "{name}");
        let stands_for = |it: &Sample| it.op.stands_for(&types(it).iter().collect::<Vec<_>>());
        if kind.samples().iter().any(|it| stands_for(it) != StandsFor::Itself) {
            // A body stands for what its ops do.
            let is_known = kind == OpKind::Fused
                || origins.contains(&Origin::Model)
                || origins.contains(&Origin::Recipe);
            assert!(is_known, "{name}");
        }
    }
    assert_eq!(OpKind::BiasAdd.origins(), [Origin::Model]);
    assert_eq!(OpKind::Quantize.origins(), [Origin::Recipe]);
}

#[test]
fn text_round_trips() {
    for sample in samples() {
        let text = sample.op.to_text();
        assert_eq!(Op::from_text(&text), Ok(sample.op), "{text}");
    }
}

#[test]
fn references_write_every_element() {
    for sample in samples() {
        let types = types(&sample);
        let types: Vec<&TensorType> = types.iter().collect();
        let infer = sample.op.infer(&types).expect("samples are well-typed");
        let results = apply(&sample.op, &operands(&sample), &types);
        assert_eq!(results.len(), infer.len(), "{}", sample.op.to_text());
        for result in results {
            assert!(result.data.iter().all(|it| it.is_finite()), "{}", sample.op.to_text());
        }
    }
}

#[test]
fn references_in_f32_agree_with_f64() {
    for sample in samples() {
        let types = types(&sample);
        let types: Vec<&TensorType> = types.iter().collect();
        let wide = apply(&sample.op, &operands(&sample), &types);
        let narrow: Vec<Tensor<f32>> =
            sample.inputs.iter().enumerate().map(|(i, it)| random(it, i as u64)).collect();
        let narrow = apply(&sample.op, &narrow, &types);
        for (a, b) in narrow.iter().zip(&wide).flat_map(|(a, b)| a.data.iter().zip(&b.data)) {
            let off = (f64::from(*a) - b).abs() / b.abs().max(1.0);
            assert!(off < F32_TOLERANCE, "{}: {a}, not {b}", sample.op.to_text());
        }
    }
}

#[test]
fn results_in_place_are_as_large_as_their_operand() {
    for sample in samples() {
        let types = types(&sample);
        let types: Vec<&TensorType> = types.iter().collect();
        let results = sample.op.infer(&types).expect("samples are well-typed");
        for &(result, operand) in sample.op.in_place() {
            assert_eq!(results[result].bytes(), types[operand].bytes(), "{}", sample.op.to_text());
        }
    }
}

/// It is one of its operand's numbers, which makes it exact in their type.
#[test]
fn amaxes_have_the_type_of_their_operand() {
    for dtype in [DType::F32, DType::Bf16] {
        let found = Op::from(Amax::default()).infer(&[&TensorType::new(dtype, &[4, 6])]);
        assert_eq!(found.map(|it| it.to_vec()), Ok(vec![TensorType::scalar(dtype)]));
    }
}

/// Bit by bit, in f32 and when both are stored in bf16: `fuse` changes no number.
#[test]
fn amaxes_on_the_way_are_those_of_the_results() {
    let round = |it: f32| bf16::from_f32(it).to_f32();
    let mut n_checked = 0;
    for sample in samples() {
        let Some(amaxes) = sample.op.amaxes().filter(|it| !it.is_none()) else { continue };
        if sample.op.codes().is_some_and(|it| !it.is_none()) {
            continue;
        }
        let types = types(&sample);
        let types: Vec<&TensorType> = types.iter().collect();
        let operands: Vec<Tensor<f32>> =
            sample.inputs.iter().enumerate().map(|(i, it)| random(it, i as u64)).collect();
        let found = apply(&sample.op, &operands, &types);
        let mut plain = sample.op.clone();
        *plain.amaxes_mut().expect("it has some") = Amaxes::default();
        let own = apply(&plain, &operands, &types);
        assert_eq!(found[..own.len()], own, "{}", sample.op.to_text());
        let made = plain.infer(&types).expect("samples are well-typed");
        let amax: Op = Amax { pieces: amaxes.pieces.clone() }.into();
        for (found, &of) in found[own.len()..].iter().zip(&amaxes.of) {
            let alone = |it: &Tensor<f32>| apply(&amax, std::slice::from_ref(it), &[&made[of]]);
            assert_eq!(*found, alone(&own[of])[0], "{}", sample.op.to_text());
            let stored = Tensor {
                shape: own[of].shape.clone(),
                data: own[of].data.iter().copied().map(round).collect(),
            };
            let rounded: Vec<f32> = found.data.iter().copied().map(round).collect();
            assert_eq!(rounded, alone(&stored)[0].data, "{}", sample.op.to_text());
            n_checked += 1;
        }
    }
    assert!(n_checked > 5, "{n_checked} amaxes");
}

/// Bit by bit, in f32: what `fuse` makes is the op, the amaxes of what that makes, and its codes.
#[test]
fn codes_on_the_way_are_those_of_the_results() {
    let mut n_checked = BTreeMap::new();
    for sample in samples() {
        let Some(codes) = sample.op.codes().filter(|it| !it.is_none()) else { continue };
        let types = types(&sample);
        let types: Vec<&TensorType> = types.iter().collect();
        let operands: Vec<Tensor<f32>> =
            sample.inputs.iter().enumerate().map(|(i, it)| random(it, i as u64)).collect();
        let found = apply(&sample.op, &operands, &types);
        let made = sample.op.infer(&types).expect("samples are well-typed");

        let amaxes = sample.op.amaxes().expect("what makes codes gives amaxes");
        let mut plain = sample.op.clone();
        *plain.codes_mut().expect("it has some") = Codes::default();
        *plain.amaxes_mut().expect("it has some") = Amaxes::default();
        let n_own = codes.own(&types).len();
        let own = apply(&plain, &operands[..n_own], &types[..n_own]);
        let wide = plain.infer(&types[..n_own]).expect("samples are well-typed");
        for (i, own) in own.iter().enumerate() {
            let Some(at) = codes.of.iter().position(|it| it.0 == i) else {
                assert_eq!(found[i], *own, "{}", sample.op.to_text());
                continue;
            };
            let to = codes.of[at].1;
            let op: Op = Quantize::new(to, Copies::Rows).into();
            let inputs = [own.clone(), operands[n_own + at].clone()];
            let alone = &apply(&op, &inputs, &[&wide[i], types[n_own + at]])[0];
            assert_eq!((&found[i], made[i].dtype), (alone, to), "{}", sample.op.to_text());
            *n_checked.entry(sample.op.kind().name()).or_insert(0) += 1;
        }
        for (found, &of) in found[own.len()..].iter().zip(&amaxes.of) {
            let amax: Op = Amax { pieces: amaxes.pieces.clone() }.into();
            let alone = &apply(&amax, std::slice::from_ref(&own[of]), &[&wide[of]])[0];
            assert_eq!(found, alone, "{}", sample.op.to_text());
        }
    }
    let expect = [("layer_norm", 2), ("rms_norm", 2)];
    assert_eq!(n_checked, BTreeMap::from(expect));
}

/// Bit by bit, in f32, by the reference and by the kernel on a CPU: what `fuse` makes is the product, with what is
/// added to it, and then the bias.
#[test]
fn biases_in_a_product_are_those_of_bias_add() {
    let mut n_checked = BTreeMap::new();
    for sample in samples() {
        let plain: Op = match &sample.op {
            Op::Matmul(it) if it.bias && !it.gelu => Matmul { bias: false, ..it.clone() }.into(),
            Op::QuantMatmul(it) if it.bias => QuantMatmul { bias: false, ..it.clone() }.into(),
            _ => continue,
        };
        let types = types(&sample);
        let types: Vec<&TensorType> = types.iter().collect();
        let mut operands: Vec<Tensor<f32>> =
            sample.inputs.iter().enumerate().map(|(i, it)| random(it, i as u64)).collect();
        let made = sample.op.infer(&types).expect("samples are well-typed").remove(0);
        let shape: Vec<usize> = made.shape.iter().map(|&it| it as usize).collect();
        let run = |op: &Op, inputs: &[Tensor<f32>]| {
            let mut out = Tensor::zeros(&shape);
            let inputs: Vec<_> = inputs.iter().map(Tensor::view).collect();
            kernels::run_f32(op, &inputs, &mut [out.view_mut()], &LocalCx { bounds: &[] });
            out
        };
        let by_kernel = run(&sample.op, &operands);
        let by_reference = apply(&sample.op, &operands, &types).remove(0);
        let bias = operands.pop().expect("the last operand is the bias");
        let n = operands.len();
        let add: Op = BiasAdd {}.into();
        assert_eq!(
            by_kernel,
            run(&add, &[run(&plain, &operands), bias.clone()]),
            "{}",
            sample.op.to_text()
        );
        let product = apply(&plain, &operands, &types[..n]).remove(0);
        let expect = apply(&add, &[product, bias], &[&made, types[n]]).remove(0);
        assert_eq!(by_reference, expect, "{}", sample.op.to_text());
        *n_checked.entry(sample.op.kind().name()).or_insert(0) += 1;
    }
    assert_eq!(n_checked, BTreeMap::from([("matmul", 2), ("quant_matmul", 4)]));
}

/// Of a bias that does not fit.
#[test]
fn a_bias_is_one_number_of_the_results_type_a_column() {
    let op = QuantMatmul {
        out: DType::Bf16,
        accumulate: false,
        bias: true,
        fast: false,
        a: Granule::default(),
        b: Granule::default(),
    };
    let (codes, scale) = (TensorType::new(DType::E4M3, &[4, 4]), TensorType::scalar(DType::F32));
    let with = |bias: TensorType| {
        let types = [&codes, &codes, &scale, &scale, &bias];
        Op::from(op.clone()).infer(&types).map(|_| ()).map_err(|it| it.to_string())
    };
    assert_eq!(with(TensorType::new(DType::Bf16, &[4])), Ok(()));
    let refused = [
        (TensorType::new(DType::Bf16, &[5]), "columns and biases"),
        (TensorType::new(DType::Bf16, &[4, 4]), "1 dim"),
        (TensorType::new(DType::F32, &[4]), "that of the result"),
    ];
    for (bias, why) in refused {
        let error = with(bias).expect_err(why);
        assert!(error.contains(why), "{error}");
    }
}

/// The op that is a body.
fn fused(body: &str) -> Op {
    Op::from_text(&format!("fused(body:\"{body}\")")).unwrap_or_else(|it| panic!("{body}: {it}"))
}

/// Bit by bit, in f32.
#[test]
fn bodies_are_their_steps_one_after_the_other() {
    for sample in OpKind::Fused.samples() {
        let Op::Fused(Fused { body }) = &sample.op else { unreachable!("it is one") };
        let mut types = types(&sample);
        let mut values: Vec<Tensor<f32>> =
            sample.inputs.iter().enumerate().map(|(i, it)| random(it, i as u64)).collect();
        let found = apply(&sample.op, &values, &types.iter().collect::<Vec<_>>());
        for step in body.steps() {
            let inputs = step.inputs.iter().map(|&it| values[usize::from(it)].clone());
            let made = {
                let types: Vec<&TensorType> =
                    step.inputs.iter().map(|&it| &types[usize::from(it)]).collect();
                let made = step.op.infer(&types).expect("samples are well-typed");
                (apply(&step.op, &inputs.collect::<Vec<_>>(), &types), made)
            };
            values.extend(made.0);
            types.extend(made.1);
        }
        let expect = body.results().iter().map(|&it| values[usize::from(it)].clone());
        assert_eq!(found, expect.collect::<Vec<_>>(), "{body}");
    }
}

/// 0.3 in bf16 is 0x3e9a.
#[test]
fn a_value_of_a_body_is_rounded_where_it_is_read() {
    let check = |body: &str, expect: f32| {
        let op = fused(body);
        let types = [TensorType::scalar(DType::Bf16), TensorType::scalar(DType::F32)];
        let one = Tensor { shape: Default::default(), data: vec![1.0f32] };
        let found = apply(&op, &[one.clone(), one], &types.iter().collect::<Vec<_>>());
        assert_eq!(found[0].data, [expect], "{body}");
    };
    let rounded = f32::from_bits(0x3e9a_0000);
    check(
        "(bf16, f32) { %2 = scale(factor:0.3) %0; %3 = cast(to:f32) %2; %4 = mul %3, %1; return %4 }",
        rounded,
    );
    check(
        "(bf16, f32) { %2 = cast(to:f32) %0; %3 = scale(factor:0.3) %2; %4 = mul %3, %1; return %4 }",
        0.3,
    );
}

/// No step reads a partial sum of another, and factors that a result does not know are whole.
#[test]
fn what_steps_cannot_shard_is_whole() {
    let mesh = Mesh::new(&[("dp", 2), ("tp", 2)]);
    let parse = |text: &str| Sharding::parse(text, &mesh).expect("a sharding");
    let check =
        |body: &str, shapes: [&[u64]; 2], shardings: [&str; 2], expect: Result<&str, &str>| {
            let types = shapes.map(|it| TensorType::new(DType::F32, it));
            let types: Vec<&TensorType> = types.iter().collect();
            let op = fused(body);
            let results = op.infer(&types).expect("well-typed");
            let factors = op.factors(&types, &results.iter().collect::<Vec<_>>());
            let [a, b] = shardings.map(parse);
            let found = factors.assign(&[&a, &b], &mesh).map_err(|it| it.to_string()).map(|it| {
                let made = factors.result(0, &it, &mesh).expect("even");
                made.display(&mesh).to_string()
            });
            match (found, expect) {
                (Ok(found), Ok(expect)) => assert_eq!(found, expect, "{body}"),
                (Err(found), Err(expect)) => assert!(found.contains(expect), "{body}: {found}"),
                (found, expect) => panic!("{body}: {found:?}, not {expect:?}"),
            }
        };
    let sum = "(f32, f32) { %2 = sum_leading %0; %3 = bias_add %1, %2; return %3 }";
    check(sum, [&[4, 6], &[8, 6]], ["[_, tp]", "[dp, tp]"], Ok("[dp, tp]"));
    check(sum, [&[4, 6], &[8, 6]], ["[dp, tp]", "[_, tp]"], Err("must be whole"));
    let two = "(f32, f32) { %2 = sum_leading %0; %3 = scale(factor:2.0) %1; return %2, %3 }";
    check(two, [&[4, 6], &[8]], ["[_, tp]", "[_]"], Err("must be whole"));
    let pieces = "(f32, f32) { %2 = add %0, %1; %3 = amax(pieces:[(0,4)]) %2; return %3, %2 }";
    check(pieces, [&[8, 6], &[8, 6]], ["[dp, tp]", "[dp, tp]"], Ok("[dp] max(tp)"));
}

/// Bodies that are none, or whose steps do not fit.
#[test]
fn bodies_that_make_no_sense_are_refused() {
    let check = |body: &str, why: &str| {
        let op = Op::from_text(&format!("fused(body:\"{body}\")"));
        let types = [TensorType::new(DType::F32, &[4, 6]), TensorType::scalar(DType::F32)];
        let error = match op {
            Err(error) => error,
            Ok(op) => op.infer(&[&types[0], &types[1]]).expect_err(why).to_string(),
        };
        assert!(error.contains(why), "{body}: {error}");
    };
    let refused = [
        ("() { return %0 }", "1 to 64 steps"),
        ("(f32) { %1 = add %0; return %0 }", "`%0` cannot be returned"),
        ("(f32) { %1 = add %0; return %1, %1 }", "`%1` cannot be returned"),
        ("(f32) { %1 = add %2; return %1 }", "`%2` is not made before it is read"),
        ("(f32) { %1 = add %1; return %1 }", "`%1` is not made before it is read"),
        ("(f32) { %2 = add %0; return %2 }", "the next one is `%1`"),
        ("(f32, f32) { %2 = add %0; return %2 }", "no step reads operand `%1`"),
        ("(f32) { %1 = add %0; return %300 }", "300 is too large"),
        ("(f32) { %1 = reshard %0; return %1 }", "`reshard` cannot be a step"),
        ("(f32) { %1 = add %0 return %1 }", "expected the end of the line"),
        ("(f32) { %1 = add %0; return %1 } x", "nothing after the closing"),
        ("(f32) { %1 = add %0; ", "truncated"),
        ("(f32) { %1 = add %0; return %1 }", "takes 1 operands, not 2"),
        ("(f32, bf16) { %2 = add %0; %3 = add %1; return %2, %3 }", "operand 1 is f32"),
        ("(f32, f32) { %2 = mul %0, %1; return %2 }", "in `mul`: numbers of dims"),
        (
            "(f32, f32) { %2, %3 = add %0, %0; %4 = add %1; return %2, %4 }",
            "names each of its results",
        ),
        (
            "(f32, f32) { %2 = merge_dims(dim:0) %0; %3 = fill(value:1.0,dtype:f32,shape:[24]); %4 = add %2, %3; \
             %5 = add %1; return %4, %5 }",
            "must be returned",
        ),
    ];
    refused.iter().for_each(|(body, why)| check(body, why));
}

/// C28 again: codes are whole where the sum beside them is that of a rank's own rows.
#[test]
fn sums_on_the_way_are_partial_over_sharded_rows() {
    let mesh = Mesh::new(&[("dp", 2), ("tp", 2)]);
    let types = [TensorType::new(DType::F32, &[4, 2, 6]), TensorType::scalar(DType::F32)];
    let op = fused(
        "(f32, f32) { %2, %3 = quantize(to:e5m2,copies:Both) %0, %1; %4 = sum_leading %0; \
         return %2, %3, %4 }",
    );
    let results = op.infer(&types.iter().collect::<Vec<_>>()).expect("well-typed");
    let factors = op.factors(&[&types[0], &types[1]], &results.iter().collect::<Vec<_>>());
    let parse = |text: &str| Sharding::parse(text, &mesh).expect("a sharding");
    let found = |x: &str| {
        let assignment = factors.assign(&[&parse(x), &parse("[]")], &mesh).expect("legal");
        let result = |i| factors.result(i, &assignment, &mesh).expect("even");
        [0, 1, 2].map(|it| result(it).display(&mesh).to_string())
    };
    assert_eq!(found("[dp, tp, _]"), ["[dp, tp, _]", "[_, dp, tp]", "[_] sum(dp, tp)"]);
    assert_eq!(found("[dp, _, tp]"), ["[dp, _, tp]", "[tp, dp, _]", "[tp] sum(dp)"]);
}

/// Their amaxes are not rounded to the type of a tensor that is not there.
#[test]
fn amaxes_of_codes_are_f32() {
    let op = fused(
        "(bf16, bf16, f32) { %3 = cast(to:f32) %0; %4 = cast(to:f32) %1; %5 = glu(kind:swiglu) %3, %4; \
         %6 = amax %5; %7 = quantize(to:e4m3) %5, %2; return %7, %6 }",
    );
    let (x, scale) = (TensorType::new(DType::Bf16, &[4, 6]), TensorType::scalar(DType::F32));
    let found = op.infer(&[&x, &x, &scale]).map(|it| it.to_vec());
    assert_eq!(found, Ok(vec![x.with_dtype(DType::E4M3), scale]));
}

/// The gradients of all operands in the sum of `weights * result`, and those weights.
struct Gradients {
    grads: Vec<Option<Value>>,
    env: Env<f64>,
}

/// Differentiates one op by its `grad`, for the results that have a gradient.
fn gradients(sample: &Sample, weights: &[Option<Tensor<f64>>]) -> Result<Gradients, GradError> {
    let mut graph = empty_graph();
    let mut env = Env::new();
    let mut inputs = Vec::new();
    for (input, operand) in sample.inputs.iter().zip(operands(sample)) {
        let value = leaf(&mut graph, &input.ty);
        env.insert(value, operand);
        inputs.push(value);
    }
    let names: Vec<String> = (0..weights.len()).map(|it| format!("r{it}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let results = Builder::new(&mut graph)
        .ops(&names, sample.op.clone(), &inputs)
        .expect("samples are well-typed");
    let mut seeds = Vec::new();
    for (&result, weight) in results.iter().zip(weights) {
        let Some(weight) = weight else { continue };
        let ty = graph.ty(result).clone();
        let seed = leaf(&mut graph, &ty);
        env.insert(seed, weight.clone());
        seeds.push((result, seed));
    }
    let constants = sample.op.constants();
    let varied = inputs.iter().enumerate().filter(|it| !constants.contains(&it.0));
    let varied: Vec<Value> =
        varied.map(|it| *it.1).filter(|&it| graph.ty(it).dtype.is_float()).collect();
    let found = backward(&mut graph, &seeds, &varied)?;
    let found = |it: &Value| found[varied.iter().position(|other| other == it)?];
    let grads: Vec<Option<Value>> = inputs.iter().map(found).collect();
    for (&input, grad) in inputs.iter().zip(&grads) {
        if let Some(grad) = *grad {
            assert_eq!(graph.ty(grad), graph.ty(input), "gradient in {}", sample.op.to_text());
        }
    }
    Ok(Gradients { grads, env: eval(&graph, env) })
}

/// Random weights of the results that have a gradient.
fn weights(sample: &Sample) -> Vec<Option<Tensor<f64>>> {
    let types = types(sample);
    let results = sample.op.infer(&types.iter().collect::<Vec<_>>()).expect("samples are typed");
    let weight = |(i, ty): (usize, &TensorType)| {
        let input = SampleInput { ty: ty.clone(), values: Values::Random };
        let wanted = ty.dtype.is_float() && !sample.op.by_products().contains(&i);
        wanted.then(|| random(&input, 100 + i as u64))
    };
    results.iter().enumerate().map(weight).collect()
}

#[test]
fn gradients_agree_with_finite_differences() {
    for sample in samples().filter(has_gradient) {
        let weights = weights(&sample);
        let Gradients { grads, env } = gradients(&sample, &weights).expect("differentiable");
        let types = types(&sample);
        let types: Vec<&TensorType> = types.iter().collect();
        let mut operands = operands(&sample);
        for i in 0..operands.len() {
            let constant = !types[i].dtype.is_float() || sample.op.constants().contains(&i);
            assert_eq!(grads[i].is_none(), constant, "{} operand {i}", sample.op.to_text());
            let Some(grad) = grads[i] else { continue };
            for at in 0..operands[i].data.len() {
                let mut value = |step: f64| {
                    let old = operands[i].data[at];
                    operands[i].data[at] = old + step;
                    let results = apply(&sample.op, &operands, &types);
                    operands[i].data[at] = old;
                    weighted_sum(&results, &weights)
                };
                let slope = (value(STEP) - value(-STEP)) / (2.0 * STEP);
                let expect = if is_frozen(&sample.op, types[i], at) { 0.0 } else { slope };
                let found = env[&grad].data[at];
                let off = (found - expect).abs() / expect.abs().max(1.0);
                let text = sample.op.to_text();
                assert!(
                    off < DIFFERENCE_TOLERANCE,
                    "{text} operand {i} [{at}]: {found}, not {expect}"
                );
            }
        }
    }
}

/// Whether an element is part of a row that an embedding does not train.
fn is_frozen(op: &Op, operand: &TensorType, at: usize) -> bool {
    let Op::Embedding(Embedding { padding_idx: Some(row) }) = op else { return false };
    at / operand.shape[1] as usize == *row as usize
}

fn weighted_sum(results: &[Tensor<f64>], weights: &[Option<Tensor<f64>>]) -> f64 {
    let pairs = results.iter().zip(weights);
    pairs
        .filter_map(|(result, weight)| Some(result.data.iter().zip(&weight.as_ref()?.data)))
        .map(|products| products.map(|(a, b)| a * b).sum::<f64>())
        .sum()
}

/// In mixed precision, a gradient has the type of what it is the gradient of.
#[test]
fn gradients_in_bf16_have_the_type_of_their_operand() {
    for sample in samples().filter(has_gradient).filter_map(|it| it.in_bf16()) {
        gradients(&sample, &weights(&sample)).expect("differentiable");
    }
    let wide = Matmul { transpose_b: true, out: Some(DType::F32), ..Matmul::default() };
    let mut sample = Sample::floats(wide, &[&[2, 4], &[3, 4]]);
    sample.inputs.iter_mut().for_each(|it| it.ty.dtype = DType::Bf16);
    gradients(&sample, &weights(&sample)).expect("differentiable");
}

#[test]
fn by_products_and_last_ops_refuse_a_gradient() {
    for sample in samples() {
        let mut weights = weights(&sample);
        if has_gradient(&sample) && sample.op.by_products().is_empty() {
            continue;
        }
        for &index in sample.op.by_products() {
            let types = types(&sample);
            let types: Vec<&TensorType> = types.iter().collect();
            weights[index] = Some(apply(&sample.op, &operands(&sample), &types)[index].clone());
        }
        // Codes have no gradients to begin with.
        if weights.iter().all(Option::is_none) {
            continue;
        }
        let refused =
            matches!(gradients(&sample, &weights), Err(GradError::NotDifferentiable { .. }));
        assert!(refused || sample.inputs.is_empty(), "{}", sample.op.to_text());
    }
}

fn meshes() -> [Mesh; 3] {
    [Mesh::new(&[("a", 2)]), Mesh::new(&[("a", 2), ("b", 2)]), Mesh::new(&[("a", 3)])]
}

#[test]
fn every_legal_sharding_computes_the_global_result() {
    let mut n_checked = 0;
    for &kind in OpKind::ALL {
        let mut n_of_op = 0;
        for sample in kind.samples() {
            let case = Case::new(sample.op.clone(), types(&sample), operands(&sample));
            for mesh in meshes() {
                for assignment in case.assignments(&mesh) {
                    case.check(&assignment, &mesh);
                    n_of_op += usize::from(!assignment.axes().is_empty());
                }
            }
        }
        let scalars =
            [OpKind::ClipScale, OpKind::Collective, OpKind::DelayedScale, OpKind::DelayedUpdate];
        let scalars = scalars.contains(&kind);
        assert!(n_of_op > 0 || scalars, "{} was never sharded", kind.name());
        n_checked += n_of_op;
    }
    assert!(n_checked > 1000, "only {n_checked} shardings were legal");
}

/// Five, six, seven or eight rows over four ranks: full, short and empty pieces.
#[test]
fn vocabulary_may_be_cut_unevenly() {
    let mesh = Mesh::new(&[("tp", 4)]);
    for kind in [
        OpKind::CeMax,
        OpKind::CeStats,
        OpKind::CeStatsGrad,
        OpKind::Embedding,
        OpKind::EmbeddingGrad,
    ] {
        for sample in kind.samples() {
            let case = Case::new(sample.op.clone(), types(&sample), operands(&sample));
            let v = case.factors.factors.iter().position(|it| it.name == 'v').expect("a factor v");
            let mut assignment = case.factors.nothing();
            assignment.layouts[v] = over(0);
            assert_eq!(case.factors.check(&assignment, &mesh), Ok(()), "{}", kind.name());
            case.check(&assignment, &mesh);
        }
    }
}

/// The assignment that shards one factor over axis 0.
fn shard(case: &Case, factor: char) -> Assignment {
    let mut res = case.factors.nothing();
    let at = case.factors.factors.iter().position(|it| it.name == factor).expect("a factor");
    res.layouts[at] = over(0);
    res
}

#[test]
fn sharding_query_groups_makes_gradients_of_keys_and_values_partial() {
    let mesh = Mesh::new(&[("tp", 2)]);
    for sample in OpKind::AttentionGrad.samples() {
        let case = Case::new(sample.op.clone(), types(&sample), operands(&sample));
        let sum = Some((ReduceOp::Sum, mesh.all()));
        let run = case.run(&shard(&case, 'h'), &mesh);
        assert_eq!([0, 1, 2].map(|it| run.results[it].partial), [None, None, None]);
        let groups = shard(&case, 'g');
        if case.factors.check(&groups, &mesh).is_ok() {
            let run = case.run(&groups, &mesh);
            assert_eq!([0, 1, 2].map(|it| run.results[it].partial), [None, sum, sum]);
            case.check(&groups, &mesh);
        }
    }
}

/// More ranks than key-value heads, the case that slicing keys and values by rank gets wrong.
#[test]
fn attention_with_replicated_key_value_heads_is_global() {
    let mesh = Mesh::new(&[("kv", 2), ("rep", 2)]);
    let (q, kv, lse): (&[u64], &[u64], &[u64]) = (&[2, 4, 16], &[2, 4, 4], &[2, 4, 8]);
    let forward = Attention { head_dim: 2, causal: true, scale: None };
    let grad = AttentionGrad { head_dim: 2, causal: true, scale: None };
    let samples =
        [Sample::floats(forward, &[q, kv, kv]), Sample::floats(grad, &[q, kv, kv, q, lse, q])];
    for sample in samples {
        let case = Case::new(sample.op.clone(), types(&sample), operands(&sample));
        let mut assignment = case.factors.nothing();
        for (at, factor) in case.factors.factors.iter().enumerate() {
            match factor.name {
                'h' => assignment.layouts[at] = over(0),
                'g' => assignment.layouts[at] = over(1),
                _ => (),
            }
        }
        let q = case.factors.input(0, &assignment, &mesh).expect("even");
        assert_eq!(q.display(&mesh).to_string(), "[_, _, kv.rep]");
        case.check(&assignment, &mesh);
    }
}

#[test]
fn split_and_merge_move_digits_between_dims() {
    let mesh = Mesh::new(&[("tp", 2)]);
    let sample = Sample::floats(SplitDim { dim: 1, inner: 4 }, &[&[3, 8]]);
    let case = Case::new(sample.op.clone(), types(&sample), operands(&sample));
    let input = Sharding::parse("[_, x2.tp]", &mesh).expect("a sharding");
    let assignment = case.factors.assign(&[&input], &mesh).expect("aligned");
    let result = case.factors.result(0, &assignment, &mesh).expect("even");
    assert_eq!(result.display(&mesh).to_string(), "[_, _, tp]");
    case.check(&assignment, &mesh);
}

#[track_caller]
fn check_values(found: &[f64], expect: &[f64]) {
    assert_eq!(found.len(), expect.len());
    for (i, (a, b)) in found.iter().zip(expect).enumerate() {
        assert!((a - b).abs() <= KNOWN_TOLERANCE * b.abs().max(1.0), "element {i}: {a}, not {b}");
    }
}

/// Runs an op on f32 tensors of these shapes and elements.
fn known(op: impl Into<Op>, operands: &[(&[usize], &[f64])]) -> Vec<Tensor<f64>> {
    let types: Vec<TensorType> = operands
        .iter()
        .map(|(shape, _)| {
            TensorType::new(DType::F32, &shape.iter().map(|&it| it as u64).collect::<Vec<_>>())
        })
        .collect();
    let operands: Vec<Tensor<f64>> =
        operands.iter().map(|(shape, data)| tensor(shape, data)).collect();
    apply(&op.into(), &operands, &types.iter().collect::<Vec<_>>())
}

/// Computed with Python's `math.erf`, `math.tanh` and `math.exp`.
#[test]
fn activations_at_known_points() {
    let x = [-3.0, -0.5, 0.0, 1.0, 2.5];
    let check = |kind, expect: [f64; 5]| {
        check_values(&known(Activation::new(kind), &[(&[5], &x)])[0].data, &expect);
    };
    check(
        ActivationKind::Gelu,
        [-0.00404969409489031, -0.15426876936299344, 0.0, 0.8413447460685429, 2.4844758366855597],
    );
    check(
        ActivationKind::GeluTanh,
        [-0.0036373920817729943, -0.15428599017485606, 0.0, 0.8411919906082768, 2.484915733910001],
    );
    check(
        ActivationKind::Silu,
        [-0.14227761953270035, -0.1887703343990727, 0.0, 0.7310585786300049, 2.3103545499468914],
    );
    check(ActivationKind::Relu, [0.0, 0.0, 0.0, 1.0, 2.5]);
    check(ActivationKind::Srelu, [0.0, 0.0, 0.0, 1.0, 6.25]);
}

/// By hand from `n = x / sqrt(7.5 + eps)` and `(x - 2.5) / sqrt(1.25 + eps)`, in Python.
#[test]
fn norms_of_a_known_row() {
    let row: (&[usize], &[f64]) = (&[1, 4], &[1.0, 2.0, 3.0, 4.0]);
    let w: (&[usize], &[f64]) = (&[4], &[1.0, 2.0, 3.0, 4.0]);
    let rms = RmsNorm { eps: 1e-5.into(), ..RmsNorm::default() };
    let res = known(rms.clone(), &[row, w]);
    check_values(&res[1].data, &[0.3651481282381064]);
    let y = [0.3651481282381064, 1.4605925129524255, 3.2863331541429575, 5.842370051809702];
    check_values(&res[0].data, &y);
    let centered = RmsNorm { zero_centered: true, ..rms };
    let res = known(centered, &[row, (&[4], &[0.0, 1.0, 2.0, 3.0])]);
    check_values(&res[0].data, &y);
    let layer = LayerNorm { eps: 1e-5.into(), ..LayerNorm::default() };
    let res = known(layer, &[row, w, (&[4], &[0.1, 0.2, 0.3, 0.4])]);
    check_values(&res[1].data, &[2.5]);
    check_values(&res[2].data, &[0.894423613312618]);
    check_values(
        &res[0].data,
        &[-1.2416354199689268, -0.694423613312618, 1.641635419968927, 5.766541679875708],
    );
}

/// Position 3 of a head of four with angles 3 and 0.3, by `math.cos` and `math.sin` in Python.
#[test]
fn rope_in_both_conventions() {
    let rope = Rope {
        head_dim: 4,
        theta: 100.0.into(),
        interleaved: false,
        scaling: None,
        inverse: false,
    };
    let mut x = vec![0.0; 16];
    x[12..].copy_from_slice(&[1.0, 2.0, 3.0, 4.0]);
    let x: (&[usize], &[f64]) = (&[1, 4, 4], &x);
    check_values(
        &known(rope.clone(), &[x])[0].data[12..],
        &[-1.413352520780047, 0.7285921516058536, -2.828857481741469, 4.412386369825104],
    );
    let interleaved = Rope { interleaved: true, ..rope };
    check_values(
        &known(interleaved, &[x])[0].data[12..],
        &[-1.27223251272018, -1.8388649851410237, 1.6839286407314598, 4.707906576486443],
    );
}

/// Llama 3.1's settings; Hugging Face's `_compute_llama3_parameters`, written out in Python.
#[test]
fn rope_scaling_is_that_of_llama_3() {
    let scaling = Llama3Scaling {
        factor: 8.0.into(),
        low_freq_factor: 1.0.into(),
        high_freq_factor: 4.0.into(),
        original_max_position_embeddings: 8192,
    };
    let rope = Rope {
        head_dim: 128,
        theta: 500000.0.into(),
        interleaved: false,
        scaling: Some(scaling),
        inverse: false,
    };
    let expect = [
        (0, 1.0),
        (10, 0.12868737343265052),
        (28, 0.0032114459947525913),
        (30, 0.0013718935677611381),
        (32, 0.0005248461609929547),
        (34, 0.00017850781276799638),
        (36, 7.78465527393245e-05),
        (40, 3.428102195952591e-05),
        (63, 3.068925988914511e-07),
    ];
    for (i, frequency) in expect {
        let off = (rope.frequency(i) / frequency - 1.0).abs();
        assert!(off < KNOWN_TOLERANCE, "pair {i}: {}, not {frequency}", rope.frequency(i));
    }
}

/// Uniform keys give the mean of the values seen so far, and the logarithm of their number.
#[test]
fn causal_attention_over_equal_keys_is_a_running_mean() {
    let op = Attention { head_dim: 1, causal: true, scale: None };
    let zeros: (&[usize], &[f64]) = (&[1, 3, 1], &[0.0; 3]);
    let res = known(op, &[zeros, zeros, (&[1, 3, 1], &[3.0, 5.0, 10.0])]);
    check_values(&res[0].data, &[3.0, 4.0, 6.0]);
    check_values(&res[1].data, &[0.0, 2f64.ln(), 3f64.ln()]);
}

/// Loss, count and gradient of the logits, all parts of the cross entropy together.
fn cross_entropy(logits: &Tensor<f64>, labels: &[f64], smoothing: f64) -> (f64, f64, Vec<f64>) {
    let mut graph = empty_graph();
    let shape: Vec<u64> = logits.shape.iter().map(|&it| it as u64).collect();
    let rows = &shape[..shape.len() - 1];
    let x = leaf(&mut graph, &TensorType::new(DType::F32, &shape));
    let y = leaf(&mut graph, &TensorType::new(DType::I32, rows));
    let seed = leaf(&mut graph, &TensorType::scalar(DType::F32));
    let mut builder = Builder::new(&mut graph);
    let m = builder.op("m", CeMax {}, &[x]).expect("typed");
    let stats = CeStats { label_smoothing: smoothing.into() };
    let stats = builder.ops(&["sumexp", "target"], stats, &[x, y, m]).expect("typed");
    let loss = CeLoss { ignore_index: -100 };
    let loss = builder.ops(&["loss", "count"], loss, &[m, stats[0], stats[1], y]).expect("typed");
    let grads = backward(&mut graph, &[(loss[0], seed)], &[x]).expect("differentiable");
    let labels = tensor(&logits.shape[..logits.shape.len() - 1], labels);
    let leaves = [(x, logits.clone()), (y, labels), (seed, tensor(&[], &[1.0]))];
    let env = eval(&graph, BTreeMap::from(leaves));
    let grad = env[&grads[0].expect("logits have a gradient")].data.clone();
    (env[&loss[0]].data[0], env[&loss[1]].data[0], grad)
}

/// `-(1 - eps) log p[label] - eps / V sum(log p)`, as `torch.nn.functional.cross_entropy` defines
/// it, and its gradient `p - (1 - eps) [label] - eps / V`; computed in Python.
#[test]
fn cross_entropy_with_ignored_label_and_smoothing() {
    let logits = tensor(&[3, 4], &[1.0, 2.0, 0.5, -1.0, 0.0, 0.3, -0.2, 2.0, 3.0, 1.0, 1.0, 0.0]);
    let labels = [1.0, -100.0, 3.0];
    let (loss, count, grad) = cross_entropy(&logits, &labels, 0.0);
    check_values(&[loss, count], &[3.773160267661414, 2.0]);
    let first =
        [0.22420781804820114, -0.3905399624011229, 0.13598891579350553, 0.030343228559416225];
    let last = [0.7573132023431748, 0.10249119673793974, 0.10249119673793974, -0.9622955958190543];
    check_values(&grad, &[first, [0.0; 4], last].concat());
    let (loss, count, grad) = cross_entropy(&logits, &labels, 0.1);
    check_values(&[loss, count], &[3.785660267661415, 2.0]);
    let first =
        [0.19920781804820115, -0.3155399624011229, 0.11098891579350553, 0.005343228559416224];
    let last = [0.7323132023431748, 0.07749119673793975, 0.07749119673793975, -0.8872955958190544];
    check_values(&grad, &[first, [0.0; 4], last].concat());
}

/// The parts drop the gradient of the maximum; the whole is right because it cancels.
#[test]
fn gradient_of_cross_entropy_agrees_with_finite_differences() {
    let input = SampleInput { ty: TensorType::new(DType::F32, &[4, 5]), values: Values::Random };
    let mut logits: Tensor<f64> = random(&input, 3);
    let labels = [0.0, 4.0, -100.0, 2.0];
    for smoothing in [0.0, 0.1] {
        let (_, _, grad) = cross_entropy(&logits, &labels, smoothing);
        for (at, &grad) in grad.iter().enumerate() {
            let mut loss = |step| {
                let old = logits.data[at];
                logits.data[at] += step;
                let (loss, _, _) = cross_entropy(&logits, &labels, smoothing);
                logits.data[at] = old;
                loss
            };
            let expect = (loss(STEP) - loss(-STEP)) / (2.0 * STEP);
            assert!((grad - expect).abs() < DIFFERENCE_TOLERANCE, "[{at}]: {grad}, not {expect}");
        }
    }
}

/// C25: a label outside the vocabulary that is not the ignored one is refused by the runtime, where
/// a batch is read. Should one get here, loss and gradient agree: the loss has no target, hence is
/// `ln(sum(exp(logits)))`, and its gradient is the softmax, not zero for one and not the other.
#[test]
fn label_out_of_range_has_the_gradient_of_its_loss() {
    let logits = tensor(&[2, 3], &[0.5, -1.0, 2.0, 0.0, 0.0, 0.0]);
    for label in [3.0, -1.0, 1e6] {
        let (loss, count, grad) = cross_entropy(&logits, &[label, 0.0], 0.0);
        let exps = [0.5f64, -1.0, 2.0].map(f64::exp);
        let sum: f64 = exps.iter().sum();
        check_values(&[loss, count], &[sum.ln() + 3f64.ln(), 2.0]);
        check_values(&grad[..3], &exps.map(|it| it / sum));
    }
}

/// C25: whatever the label, every mesh has the same loss and gradient.
#[test]
fn label_out_of_range_is_the_same_on_any_mesh() {
    let mesh = Mesh::new(&[("tp", 2)]);
    for kind in [OpKind::CeStats, OpKind::CeStatsGrad] {
        for sample in kind.samples() {
            let mut operands = operands(&sample);
            operands[1].data[0] = 1000.0;
            operands[1].data[1] = -1.0;
            let case = Case::new(sample.op.clone(), types(&sample), operands);
            case.check(&shard(&case, 'v'), &mesh);
        }
    }
}

/// C27: `padding_idx` is a global index. With ten rows over two ranks, rank 1 holds row 7 as its
/// row 2; row 2 of rank 0 must keep its gradient.
#[test]
fn padding_row_is_found_by_its_global_index() {
    let mesh = Mesh::new(&[("tp", 2)]);
    let ids = [7.0, 2.0, 9.0, 7.0, 2.0, 4.0];
    let sample = Sample::floats(Embedding { padding_idx: Some(7) }, &[&[6], &[10, 2]])
        .fill(0, Values::Ids(10));
    let dy: Vec<f64> = (0..12).map(|it| f64::from(it) + 1.0).collect();
    let op = ir::ops::EmbeddingGrad { vocab: 10, padding_idx: Some(7), out: None };
    let dy_ty = TensorType::new(DType::F32, &[6, 2]);
    let inputs = vec![sample.inputs[0].ty.clone(), dy_ty];
    let case = Case::new(op, inputs, vec![tensor(&[6], &ids), tensor(&[6, 2], &dy)]);
    let mut expect = vec![0.0; 20];
    expect[4..6].copy_from_slice(&[3.0 + 9.0, 4.0 + 10.0]);
    expect[8..10].copy_from_slice(&[11.0, 12.0]);
    expect[18..20].copy_from_slice(&[5.0, 6.0]);
    assert_eq!(case.expect[0].data, expect);
    case.check(&shard(&case, 'v'), &mesh);
    let mut operands = operands(&sample);
    operands[0] = tensor(&[6], &ids);
    let forward = Case::new(sample.op.clone(), types(&sample), operands);
    forward.check(&shard(&forward, 'v'), &mesh);
}

/// C28: the bias of a row-parallel layer is added once, not once per rank: `bias_add` takes a sum
/// over ranks only together with a bias that is a sum over the same ranks.
#[test]
fn bias_is_added_once_to_a_partial_sum() {
    let mesh = Mesh::new(&[("tp", 2)]);
    let inputs = vec![TensorType::new(DType::F32, &[2, 3]), TensorType::new(DType::F32, &[3])];
    let x = tensor(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let bias = tensor(&[3], &[100.0, 200.0, 300.0]);
    let case = Case::new(BiasAdd {}, inputs, vec![x, bias]);
    assert_eq!(case.expect[0].data, [101.0, 202.0, 303.0, 104.0, 205.0, 306.0]);
    let parse = |text| Sharding::parse(text, &mesh).expect("a sharding");
    let partial = parse("[_, _] sum(tp)");
    assert_eq!(
        case.factors.assign(&[&partial, &parse("[_]")], &mesh),
        Err(Conflict::Partial { operand: 1 })
    );
    let both = case.factors.assign(&[&partial, &parse("[_] sum(tp)")], &mesh).expect("linear");
    assert_eq!(case.factors.result(0, &both, &mesh), Some(partial));
    case.check(&both, &mesh);
}

/// C28: under sequence parallelism each rank sums its own rows, so the gradient of the bias is a
/// partial sum, which no pass can forget to reduce.
#[test]
fn gradient_of_bias_is_partial_over_sharded_rows() {
    let mesh = Mesh::new(&[("tp", 2)]);
    let sample = &OpKind::SumLeading.samples()[0];
    let case = Case::new(sample.op.clone(), types(sample), operands(sample));
    let rows = Sharding::parse("[_, tp, _]", &mesh).expect("a sharding");
    let assignment = case.factors.assign(&[&rows], &mesh).expect("legal");
    let result = case.factors.result(0, &assignment, &mesh).expect("even");
    assert_eq!(result.display(&mesh).to_string(), "[_] sum(tp)");
    case.check(&assignment, &mesh);
}

/// C57: the mask depends on the seed, the key and the global index, and on nothing else.
#[test]
fn dropout_mask_is_the_same_on_any_mesh() {
    let op = Dropout { rate: 0.5.into(), key: stream_key("model.layers.0.dropout") };
    let inputs = vec![TensorType::new(DType::F32, &[8, 16, 12]), TensorType::scalar(DType::I32)];
    let ones = tensor(&[8, 16, 12], &vec![1.0; 8 * 16 * 12]);
    let case = Case::new(op.clone(), inputs.clone(), vec![ones.clone(), tensor(&[], &[5.0])]);
    for mesh in [Mesh::new(&[("a", 8)]), Mesh::new(&[("a", 2), ("b", 4)]), Mesh::new(&[("a", 5)])] {
        for assignment in case.assignments(&mesh) {
            case.check(&assignment, &mesh);
        }
    }
    let types: Vec<&TensorType> = inputs.iter().collect();
    let mask = |op: &Dropout, seed: f64| {
        apply(&op.clone().into(), &[ones.clone(), tensor(&[], &[seed])], &types)[0].data.clone()
    };
    assert_ne!(mask(&op, 5.0), mask(&op, 6.0));
    assert_ne!(mask(&op, 5.0), mask(&Dropout { key: 1, ..op.clone() }, 5.0));
    let kept = mask(&op, 5.0).iter().filter(|&&it| it == 2.0).count();
    // 1536 fair coins: five standard deviations are 98.
    assert!(kept.abs_diff(768) < 98, "{kept} of 1536 stay");
}

/// Gradients of one parameter in two steps.
const STEPS: [f64; 2] = [0.5, -0.25];

/// The states that one of the Adams leaves of one element's parameter, `m`, `v` and count of updates; `rest` is its gradient,
/// the factor of gradients, the learning rate, and whether the update is applied.
fn updated(op: &Op, states: &[f64], rest: [f64; 4]) -> Vec<f64> {
    let operands: Vec<f64> = states.iter().copied().chain(rest).collect();
    let operands: Vec<(&[usize], &[f64])> = operands
        .iter()
        .enumerate()
        .map(|(i, it)| {
            let shape: &[usize] = if [0, 1, 2, 4].contains(&i) { &[1] } else { &[] };
            (shape, std::slice::from_ref(it))
        })
        .collect();
    known(op.clone(), &operands).iter().map(|it| it.data[0]).collect()
}

/// Two steps on a parameter that starts at 1 with learning rate 0.1, by the formulas of
/// `torch/optim/adamw.py` and `adam.py` (single tensor) in Python.
#[test]
fn two_steps_of_adam_and_adamw() {
    let run = |op: Op, expect: [[f64; 3]; 2]| {
        let mut state = vec![1.0, 0.0, 0.0, 0.0];
        for (t, (grad, expect)) in STEPS.iter().zip(expect).enumerate() {
            // Gradients of a loss summed over four tokens.
            state = updated(&op, &state, [4.0 * grad, 0.25, 0.1, 1.0]);
            check_values(&state[..3], &expect);
            assert_eq!(state[3], t as f64 + 1.0, "updates are counted");
            // Not applied, and not a number: a step that is left out leaves no trace.
            for applied in [0.0, f64::NAN] {
                assert_eq!(updated(&op, &state, [f64::NAN, f64::NAN, 0.1, applied]), state);
            }
        }
    };
    let (beta1, beta2) = (Number(0.9), Number(0.999));
    let (eps, weight_decay) = (Number(1e-8), Number(0.01));
    run(
        AdamW { beta1, beta2, eps, weight_decay, compute: None, amax: Amaxes::default() }.into(),
        [
            [0.899000002, 0.04999999999999999, 0.0002500000000000002],
            [0.8714672987058463, 0.019999999999999997, 0.0003122500000000003],
        ],
    );
    run(
        Adam { beta1, beta2, eps, weight_decay, compute: None, amax: Amaxes::default() }.into(),
        [
            [0.9000000019607843, 0.05099999999999999, 0.00026010000000000025],
            [0.8712293476231743, 0.02180000000196078, 0.0003179208999905493],
        ],
    );
}

/// As above, by the formulas of `torch/optim/sgd.py`: the buffer starts as the first gradient.
#[test]
fn two_steps_of_sgd_with_momentum() {
    let op = Sgd { momentum: 0.9.into(), weight_decay: 0.01.into() };
    let mut state = [1.0, 0.0];
    let updated = |state: [f64; 2], grad: f64, applied: f64| {
        let res = known(
            op.clone(),
            &[
                (&[1], &state[..1]),
                (&[1], &state[1..]),
                (&[1], &[4.0 * grad]),
                (&[], &[0.25]),
                (&[], &[0.1]),
                (&[], &[applied]),
            ],
        );
        [res[0].data[0], res[1].data[0]]
    };
    for (grad, expect) in STEPS.iter().zip([[0.949, 0.51], [0.927151, 0.21849]]) {
        state = updated(state, *grad, 1.0);
        check_values(&state, &expect);
        for applied in [0.0, f64::NAN] {
            assert_eq!(updated(state, f64::INFINITY, applied), state);
        }
    }
}

#[test]
fn gradients_are_clipped_to_the_norm_of_the_mean() {
    let clip = |max_norm: Option<f64>, sumsq: f64, count: f64| {
        let op = ClipScale { max_norm: max_norm.map(Number) };
        let res = known(op, &[(&[], &[sumsq]), (&[], &[count]), (&[], &[3.0])]);
        [res[0].data[0], res[1].data[0]]
    };
    // The norm 40 of a sum over 4 tokens is 10 for their mean.
    check_values(&clip(None, 1600.0, 4.0), &[0.25, 10.0]);
    check_values(&clip(Some(20.0), 1600.0, 4.0), &[0.25, 10.0]);
    check_values(&clip(Some(5.0), 1600.0, 4.0), &[0.25 * 5.0 / (10.0 + 1e-6), 10.0]);
    // Nothing to learn from, nothing divided by zero.
    check_values(&clip(Some(1.0), 0.0, 0.0), &[1.0, 0.0]);
    assert!(clip(Some(1.0), f64::NAN, 4.0)[0].is_nan());
}

#[test]
fn updates_are_applied_if_all_is_finite_and_a_token_counts() {
    let applied = |sumsq: f64, count: f64, loss: f64| {
        let op = ClipScale { max_norm: None };
        known(op, &[(&[], &[sumsq]), (&[], &[count]), (&[], &[loss])])[2].data[0]
    };
    assert_eq!(applied(1600.0, 4.0, 3.0), 1.0);
    assert_eq!(applied(0.0, 0.0, 0.0), 0.0);
    for (watched, is_applied) in [(0.0, true), (f64::INFINITY, false), (f64::NAN, false)] {
        let scalars = [[1.0], [4.0], [3.0], [0.0], [watched]];
        let operands = scalars.each_ref().map(|it| (&[][..], &it[..]));
        let applied = known(ClipScale { max_norm: None }, &operands)[2].data[0];
        assert_eq!(applied == 1.0, is_applied, "{watched}");
        assert_eq!(applied.is_nan(), !is_applied, "{watched}");
    }
    for (sumsq, loss) in
        [(f64::INFINITY, 3.0), (f64::NAN, 3.0), (1.0, f64::INFINITY), (1.0, f64::NAN)]
    {
        assert!(applied(sumsq, 4.0, loss).is_nan(), "{sumsq} {loss}");
    }
}

#[test]
fn numbers_that_are_not_finite_are_watched() {
    let watch =
        |a: f64, b: f64| known(Watch {}, &[(&[2], &[1.0, a]), (&[2], &[b, -3e38])])[0].data[0];
    assert_eq!(watch(2.0, 3e38), 0.0);
    for it in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
        assert!(watch(it, 1.0).is_nan() && watch(1.0, it).is_nan(), "{it}");
    }
}

/// The axes to reduce over are those that the gradient is spread over, and no replica's.
#[test]
fn norm_of_a_sharded_gradient_is_partial_over_its_shards() {
    let mesh = Mesh::new(&[("replica", 2), ("shard", 2)]);
    let sample = &OpKind::SumSquares.samples()[0];
    let case = Case::new(sample.op.clone(), types(sample), operands(sample));
    let grad = Sharding::parse("[shard, _]", &mesh).expect("a sharding");
    let assignment = case.factors.assign(&[&grad], &mesh).expect("legal");
    let result = case.factors.result(0, &assignment, &mesh).expect("even");
    assert_eq!(result.display(&mesh).to_string(), "[] sum(shard)");
    case.check(&assignment, &mesh);
}

#[test]
fn attention_counts_half_if_causal_and_five_halves_backward() {
    let (q, kv): (&[u64], &[u64]) = (&[2, 4, 12], &[2, 4, 6]);
    let full = Attention { head_dim: 3, causal: false, scale: None };
    let causal = Attention { causal: true, ..full.clone() };
    let backward = AttentionGrad { head_dim: 3, causal: false, scale: None };
    // Two GEMMs of 2 s t d for each of the 2 sequences and 4 query heads.
    let gemms = 2 * (2 * 4 * 4 * 3) * 2 * 4;
    assert_eq!(Op::from(full).flops(&[q, kv, kv], &[q]), gemms);
    assert_eq!(Op::from(causal).flops(&[q, kv, kv], &[q]), gemms / 2);
    assert_eq!(Op::from(backward).flops(&[q, kv, kv], &[q, kv, kv]), gemms * 5 / 2);
}
