//! Labels that do not count, labels that do not exist, and one denominator for all.
//!
//! Most expected numbers are by hand: where logits are all zero, softmax is `1 / V`, the loss of
//! every token is `ln(V)`, and the gradient of the bias that made the logits is
//! `1 / V - n_v / N`, where `n_v` of the `N` tokens that count have label `v`.

use ir::ops::{Add, CeLoss, CeMax, CeStats};
use ir::{Builder, Graph, Section, Value};
use runtime::Batch;

use crate::harness::*;

const V: usize = 5;

/// Logits are a bias, since the embedding is zero. With `tp`, the bias is that of a row-parallel
/// projection.
const BIAS: &str = r#"Model(
    name: "bias",
    batch: Global(4),
    sequence: 8,
    optimizer: Sgd(momentum: 0.9),
    layers: [
        Embedding(name: "embed", vocab: 5, dim: 8, init: Zeros),
        Linear(name: "logits", out_features: 5, parallel_mode: Row, init: Zeros),
        CrossEntropy(),
    ],
)"#;

const IGNORED: i32 = -100;

/// Four sequences of eight, of which only the first 3, 5, 0 and 7 labels count.
fn masked() -> Batch {
    let tokens = (0..32).map(|it| it % V as i32).collect();
    let counted = [3, 5, 0, 7];
    let labels = (0..32).map(|it| {
        let (row, column) = (it / 8, it % 8);
        if column < counted[row as usize] { (3 * it + 1) % V as i32 } else { IGNORED }
    });
    Batch { tokens, labels: labels.collect() }
}

/// By hand; see above.
fn gradient_by_hand(labels: &[&[i32]]) -> Vec<f32> {
    let counted: Vec<i32> = labels.concat().into_iter().filter(|&it| it != IGNORED).collect();
    let n = counted.len() as f64;
    let share = |v: usize| counted.iter().filter(|&&it| it == v as i32).count() as f64 / n;
    (0..V).map(|v| (1.0 / V as f64 - share(v)) as f32).collect()
}

// C29, torchtitan#2972 and PR#2206: ranks with different numbers of labels that count.
#[test]
fn every_token_that_counts_counts_the_same() {
    let batch = masked();
    let expect = gradient_by_hand(&[&batch.labels]);
    for mesh in ["1", "2", "4", "2x2", "1x4", "2x2x2"] {
        for micro_batches in ["1", "2"] {
            for reduce in ["EveryMicroBatch", "LastMicroBatch"] {
                let set = [("micro_batches", micro_batches), ("reduce_gradients", reduce)];
                // 4 sequences are not 2 micro-batches of 4 ranks.
                if (mesh, micro_batches) == ("4", "2") || (mesh, micro_batches) == ("2x2x2", "2") {
                    continue;
                }
                let what = format!("mesh {mesh}, {set:?}");
                let found = train_on(&what, compile(BIAS, mesh, &set), &[batch.clone()]);
                close(found.losses[0], (V as f64).ln(), LOSS, &what);
                check_tensor(found.gradient("logits.bias"), &expect, LOSS, &what);
            }
        }
    }
}

// C29 with 3 and 5 labels on two ranks, in a model with everything in it.
#[test]
fn a_real_model_with_ignored_labels_trains_like_one_rank() {
    let source = crate::data_parallel::SMALL.replace("Global(16)", "Global(4)");
    let mut labels: Vec<i32> = (0..16).collect();
    labels.iter_mut().for_each(|it| *it %= 13);
    labels[3] = IGNORED;
    labels[8..13].fill(IGNORED);
    let batch = Batch { tokens: (0..16).map(|it| 5 * it % 13).collect(), labels };
    let run = |mesh: &str, micro_batches: &str| {
        let plan = compile(&source, mesh, &[("micro_batches", micro_batches)]);
        train_on(&format!("mesh {mesh} / {micro_batches}"), plan, &[batch.clone()])
    };
    let expect = run("1", "1");
    for (mesh, micro_batches) in [("1", "2"), ("2", "1"), ("2", "2"), ("4", "1"), ("2x2", "2")] {
        run(mesh, micro_batches).check_like(&expect);
    }
}

// C25, torchtitan PR#4297: a label outside the vocabulary had no loss and a gradient.
#[test]
fn a_label_outside_the_vocabulary_ends_the_step_and_is_named() {
    for mesh in ["1", "2x2"] {
        let session = start(&compile(BIAS, mesh, &[]));
        for bad in [5, 6, -1, -99, i32::MAX, i32::MIN] {
            let mut batch = masked();
            batch.labels[9] = bad;
            let error = session.step(&batch, 0.1, 1).unwrap_err();
            assert_eq!(error.code(), "PL0526");
            assert_eq!(
                error.to_string(),
                format!(
                    "`labels of the batch`, position 9: token {bad} is outside the vocabulary of 5; \
                     use the tokenizer that the model was made for, or a larger vocabulary"
                )
            );
        }
        let mut batch = masked();
        batch.tokens[17] = 5;
        let error = session.step(&batch, 0.1, 1).unwrap_err().to_string();
        assert!(error.contains("`tokens of the batch`, position 17: token 5"), "{error}");
        // Nothing has been harmed, and the ignored label is fine.
        let batch = masked();
        let found = run(mesh, &session, &[batch.clone()]);
        let expect = gradient_by_hand(&[&batch.labels]);
        check_tensor(found.gradient("logits.bias"), &expect, LOSS, mesh);
    }
}

/// Adds a second cross entropy of the same logits, that ignores another label; losses and counts of
/// both are added up. (The schema has one loss a model.)
fn with_second_loss(graph: &mut Graph, ignore_index: i64) {
    let named = |name: &str| -> Value {
        graph.values.iter().find(|it| it.1.name == name).unwrap_or_else(|| panic!("{name}")).0
    };
    let (logits, labels) = (named("logits"), named("labels"));
    let [sum, count] = [0, 1].map(|it| graph.results[it].1);
    let mut builder = Builder::new(graph);
    builder.section = Section::Forward;
    let max = builder.op("second.max", CeMax {}, &[logits]).unwrap();
    let stats = builder
        .ops(&["second.sumexp", "second.target"], CeStats::default(), &[logits, labels, max])
        .unwrap();
    let inputs = [max, stats[0], stats[1], labels];
    let loss =
        builder.ops(&["second.sum", "second.count"], CeLoss { ignore_index }, &inputs).unwrap();
    let sum = builder.op("both.sum", Add {}, &[sum, loss[0]]).unwrap();
    let count = builder.op("both.count", Add {}, &[count, loss[1]]).unwrap();
    graph.results = vec![("loss_sum".into(), sum), ("loss_count".into(), count)];
}

// C30, Megatron-LM#7452 row 3: the second loss was divided by the labels that one rank counts.
#[test]
fn two_losses_with_unequal_masks_have_one_denominator() {
    // The first loss ignores -100 and the second 2, which the first counts. A token of the second
    // with label -100 would be wrong there, so every row has labels only.
    let labels: Vec<i32> = (0..32).map(|it| if it < 11 { 2 } else { (7 * it + 1) % 5 }).collect();
    let batch = Batch { tokens: (0..32).map(|it| it % 5).collect(), labels };
    let second: Vec<i32> =
        batch.labels.iter().map(|&it| if it == 2 { IGNORED } else { it }).collect();
    let expect = gradient_by_hand(&[&batch.labels, &second]);
    for mesh in ["1", "2", "4", "2x2", "1x4", "2x2x2"] {
        for micro_batches in ["1", "2"] {
            if (mesh, micro_batches) == ("4", "2") || (mesh, micro_batches) == ("2x2x2", "2") {
                continue;
            }
            let set = [("micro_batches", micro_batches)];
            let mut graph = logical(BIAS, mesh, &set).unwrap();
            with_second_loss(&mut graph, 2);
            let what = format!("mesh {mesh}, {set:?}");
            let found = train_on(&what, finish(graph), &[batch.clone()]);
            close(found.losses[0], (V as f64).ln(), LOSS, &what);
            check_tensor(found.gradient("logits.bias"), &expect, LOSS, &what);
        }
    }
}

// C30: a model of two losses is an error, and not a model of the last one.
#[test]
fn a_second_loss_in_the_schema_is_an_error() {
    let two = BIAS.replace("CrossEntropy(),", "CrossEntropy(), CrossEntropy(ignore_index: 2),");
    assert!(error(&two, "1", &[]).starts_with("PL0212"), "{}", error(&two, "1", &[]));
}
