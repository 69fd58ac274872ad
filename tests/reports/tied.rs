//! Tied weights are one parameter with two uses.

use runtime::Data;

use crate::harness::*;

const TIED: &str = r#"Model(
    name: "tied",
    batch: Global(8),
    sequence: 4,
    init: Normal(std: 0.5),
    optimizer: Sgd(momentum: 0.9),
    tied: [("head.weight", "embed.weight")],
    layers: [
        Embedding(name: "embed", vocab: 10, dim: 4),
        Residual(body: [Linear(name: "up", out_features: 4), Activation(kind: silu)]),
        LmHead(name: "head"),
        CrossEntropy(),
    ],
)"#;

// C16, verl#7834: the embedding of a tied pair got one half of its gradient.
#[test]
fn a_tied_gradient_is_the_sum_of_both_uses() {
    let untied = compile(TIED, "1", &[("tied", "[]")]);
    let batch = Data::synthetic(&untied.run, 7).batch(0).unwrap();
    let session = start(&untied);
    let weight = session.read("embed.weight").unwrap().data;
    session.write("head.weight", &weight).unwrap();
    session.prepare().unwrap();
    let apart = run("untied", &session, &[batch]);
    let uses = [apart.gradient("embed.weight"), apart.gradient("head.weight")];
    let sum: Vec<f32> = uses[0].iter().zip(uses[1]).map(|(a, b)| a + b).collect();
    assert!(uses.iter().all(|it| it.iter().any(|&it| it != 0.0)));
    for mesh in ["1", "4", "2x2", "1x4", "2x2x2"] {
        let found = train(TIED, mesh, &[], 1);
        let what = format!("mesh {mesh}");
        check_tensor(found.gradient("embed.weight"), &sum, GRADIENT, &what);
        close(found.losses[0], apart.losses[0], LOSS, &what);
        assert!(!found.tensors.contains_key("head.weight"), "{what}: one tensor, one state");
    }
}
