//! Weights from files: each parameter once, by name or alias, in its shape.

use std::path::PathBuf;

use half::{bf16, f16};
use ir::graph::Init;
use ir::plan::Plan;
use runtime::RunError;
use runtime::weights::Weights;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::build::{PlanBuilder, file, mesh, session};

type Tensor<'a> = (&'a str, Dtype, &'a [usize], Vec<u8>);

fn f32s(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

fn weights(name: &str, tensors: &[Tensor<'_>]) -> PathBuf {
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (*name, TensorView::new(*dtype, shape.to_vec(), bytes).expect("a tensor"))
    });
    file(name, &safetensors::serialize(views, None).expect("serialized"))
}

/// Two parameters, the first with another name `head`.
fn plan(text: &str) -> Plan {
    let mut builder = PlanBuilder::new(mesh(text));
    builder.param("embed", &[5, 3], "[tp.dp, _]", Init::Zeros);
    builder.param("norm", &[3], "[dp]", Init::Zeros);
    builder.plan.params[0].aliases.push("head".to_string());
    builder.plan
}

fn embed() -> Vec<u8> {
    f32s((0..15).map(|it| it as f32))
}

#[track_caller]
fn refused(name: &str, tensors: &[Tensor<'_>]) -> (&'static str, String) {
    let path = weights(name, tensors);
    let error: RunError = Weights::open(&plan("2x2"), &[path]).expect_err("it is refused");
    let folder = format!("{}/", env!("CARGO_TARGET_TMPDIR"));
    (error.code(), error.to_string().replace(&folder, ""))
}

#[test]
fn weights_are_read_by_name_on_every_mesh() {
    let norm = f32s([0.5, -1.0, 3.0]);
    for (i, name) in ["embed", "head"].into_iter().enumerate() {
        let path = weights(
            &format!("good{i}.safetensors"),
            &[(name, Dtype::F32, &[5, 3], embed()), ("norm", Dtype::F32, &[3], norm.clone())],
        );
        for text in ["1x1", "2x2", "2x4"] {
            let plan = plan(text);
            let session = session(&plan);
            session
                .load_weights(&Weights::open(&plan, std::slice::from_ref(&path)).expect("opens"))
                .expect("loads");
            let expect: Vec<f32> = (0..15).map(|it| it as f32).collect();
            assert_eq!(session.read("embed").expect("read").data, expect);
            assert_eq!(session.read("norm").expect("read").data, [0.5, -1.0, 3.0]);
        }
    }
}

#[test]
fn other_floats_are_converted_and_files_joined() {
    let values: [f32; 3] = [0.5, -1.0, 3.0];
    let all = [
        (Dtype::BF16, values.iter().flat_map(|&it| bf16::from_f32(it).to_le_bytes()).collect()),
        (Dtype::F16, values.iter().flat_map(|&it| f16::from_f32(it).to_le_bytes()).collect()),
        (Dtype::F64, values.iter().flat_map(|&it| f64::from(it).to_le_bytes()).collect()),
    ];
    let first = weights("first.safetensors", &[("embed", Dtype::F32, &[5, 3], embed())]);
    for (i, (dtype, bytes)) in all.into_iter().enumerate() {
        let bytes: Vec<u8> = bytes;
        let name = format!("second{i}.safetensors");
        let second = weights(&name, &[("norm", dtype, &[3], bytes)]);
        let plan = plan("2x2");
        let session = session(&plan);
        let opened = Weights::open(&plan, &[first.clone(), second]).expect("opens");
        session.load_weights(&opened).expect("loads");
        assert_eq!(session.read("norm").expect("read").data, values);
    }
}

#[test]
fn missing_and_unexpected_names_are_listed() {
    assert_eq!(
        refused("names.safetensors", &[("emb", Dtype::F32, &[5, 3], embed())]),
        (
            "PL0530",
            "`names.safetensors`: 2 missing (embed, norm), 1 unexpected (emb); give a file whose names \
             are those of the model (`planc inspect` lists them)"
                .to_string()
        )
    );
}

#[test]
fn other_shapes_are_listed() {
    let norm = f32s([0.5; 4]);
    let tensors: [Tensor<'_>; 2] =
        [("embed", Dtype::F32, &[3, 5], embed()), ("norm", Dtype::F32, &[4], norm)];
    assert_eq!(
        refused("shapes.safetensors", &tensors),
        (
            "PL0531",
            "weights have other shapes than the model: `embed` is [3, 5] and must be [5, 3], `norm` is \
             [4] and must be [3]; give the weights of this model or change its sizes"
                .to_string()
        )
    );
}

#[test]
fn integers_are_no_weights() {
    let tensors: [Tensor<'_>; 2] =
        [("embed", Dtype::F32, &[5, 3], embed()), ("norm", Dtype::I32, &[3], vec![0; 12])];
    assert_eq!(refused("integers.safetensors", &tensors).0, "PL0532");
}

#[test]
fn tied_weights_may_come_twice_if_they_are_equal() {
    let norm: Tensor<'_> = ("norm", Dtype::F32, &[3], f32s([1.0; 3]));
    let embed_too: Tensor<'_> = ("head", Dtype::F32, &[5, 3], embed());
    let good = [("embed", Dtype::F32, &[5, 3][..], embed()), embed_too, norm.clone()];
    Weights::open(&plan("2x2"), &[weights("tied.safetensors", &good)]).expect("opens");
    let other: Tensor<'_> = ("head", Dtype::F32, &[5, 3], f32s([0.0; 15]));
    let bad = [("embed", Dtype::F32, &[5, 3][..], embed()), other, norm];
    assert_eq!(refused("untied.safetensors", &bad).0, "PL0533");
}
