//! Data sources: what a step gets from each, and what is refused.

use std::path::PathBuf;

use ir::run::Run;
use runtime::{Data, RunError, TokenWidth};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::build::file;

fn run(global_batch: u64, sequence: u64, vocab: u64) -> Run {
    Run { global_batch, sequence, vocab, ..Run::default() }
}

fn tensor(name: &str, dtype: Dtype, shape: &[usize], bytes: &[u8]) -> PathBuf {
    let view = TensorView::new(dtype, shape.to_vec(), bytes).expect("a tensor");
    file(name, &safetensors::serialize([("tokens", view)], None).expect("serialized"))
}

fn bytes16(values: impl IntoIterator<Item = u16>) -> Vec<u8> {
    values.into_iter().flat_map(u16::to_le_bytes).collect()
}

#[track_caller]
fn check(data: &Data, step: u64, tokens: &[i32], labels: &[i32]) {
    let batch = data.batch(step).unwrap_or_else(|it| panic!("{it}"));
    assert_eq!((batch.tokens.as_slice(), batch.labels.as_slice()), (tokens, labels));
}

#[track_caller]
fn refused(paths: &[PathBuf], run: &Run) -> (&'static str, String) {
    refused_with(Data::open(paths, run, None).map(|_| ()))
}

#[track_caller]
fn refused_with(result: Result<(), RunError>) -> (&'static str, String) {
    let error = result.expect_err("it is refused");
    let folder = format!("{}/", env!("CARGO_TARGET_TMPDIR"));
    (error.code(), error.to_string().replace(&folder, ""))
}

/// Windows of three tokens, each starting where the last input of the one before was.
#[test]
fn a_stream_is_cut_into_windows_and_starts_over() {
    let path = file("stream.bin", &bytes16(0..9));
    let data = Data::open(&[path], &run(2, 2, 100), None).expect("opens");
    check(&data, 0, &[0, 1, 2, 3], &[1, 2, 3, 4]);
    check(&data, 1, &[4, 5, 6, 7], &[5, 6, 7, 8]);
    check(&data, 2, &[0, 1, 2, 3], &[1, 2, 3, 4]);
    assert_eq!(data.steps(), None);
}

#[test]
fn files_are_joined() {
    let paths = [file("joined1.bin", &bytes16(0..4)), file("joined2.bin", &bytes16(4..7))];
    let data = Data::open(&paths, &run(1, 3, 100), None).expect("opens");
    check(&data, 0, &[0, 1, 2], &[1, 2, 3]);
    check(&data, 1, &[3, 4, 5], &[4, 5, 6]);
}

#[test]
fn the_width_of_tokens_follows_the_vocabulary() {
    let bytes: Vec<u8> = (70_000u32..70_005).flat_map(u32::to_le_bytes).collect();
    let path = file("wide.bin", &bytes);
    let data = Data::open(std::slice::from_ref(&path), &run(1, 2, 80_000), None).expect("opens");
    check(&data, 0, &[70_000, 70_001], &[70_001, 70_002]);
    let narrow = Data::open(&[path], &run(1, 2, 80_000), Some(TokenWidth::U16)).expect("opens");
    check(&narrow, 0, &[4464, 1], &[1, 4465]);
    // All ids below 65536 fit into two bytes.
    let path = file("limit.bin", &bytes16([65_535, 0, 65_535]));
    let data = Data::open(&[path], &run(1, 2, 65_536), None).expect("opens");
    check(&data, 0, &[65_535, 0], &[0, 65_535]);
}

#[test]
fn text_is_bytes() {
    let path = file("text.txt", "héy, you".as_bytes());
    let data = Data::open(&[path], &run(1, 4, 256), None).expect("opens");
    check(&data, 0, &[104, 195, 169, 121], &[195, 169, 121, 44]);
    let path = file("text.bin", "héy, you".as_bytes());
    let data = Data::open(&[path], &run(1, 4, 256), Some(TokenWidth::U8)).expect("opens");
    check(&data, 1, &[44, 32, 121, 111], &[32, 121, 111, 117]);
}

#[test]
fn rows_of_a_tensor_are_samples() {
    let values: Vec<u8> = (0i64..12).flat_map(i64::to_le_bytes).collect();
    let path = tensor("rows.safetensors", Dtype::I64, &[4, 3], &values);
    let data = Data::open(&[path], &run(3, 2, 100), None).expect("opens");
    check(&data, 0, &[0, 1, 3, 4, 6, 7], &[1, 2, 4, 5, 7, 8]);
    check(&data, 1, &[9, 10, 0, 1, 3, 4], &[10, 11, 1, 2, 4, 5]);
}

#[test]
fn steps_of_a_tensor_end() {
    let values: Vec<u8> = (0i32..12).flat_map(i32::to_le_bytes).collect();
    let path = tensor("steps.safetensors", Dtype::I32, &[2, 2, 3], &values);
    let data = Data::open(&[path], &run(2, 2, 100), None).expect("opens");
    check(&data, 1, &[6, 7, 9, 10], &[7, 8, 10, 11]);
    assert_eq!(data.steps(), Some(2));
    data.check_steps(2).expect("enough");
    let expect =
        "`steps.safetensors` holds 2 steps, and step 3 was asked for; run with `--steps 2`";
    assert_eq!(refused_with(data.check_steps(5)), ("PL0523", expect.to_string()));
    assert_eq!(refused_with(data.batch(2).map(|_| ())).0, "PL0523");
}

#[test]
fn unsigned_and_short_integers_are_read() {
    let short: Vec<u8> = [5i16, -100, 7].into_iter().flat_map(i16::to_le_bytes).collect();
    let path = tensor("short.safetensors", Dtype::I16, &[1, 3], &short);
    let two = Run { sequence: 2, ..run(1, 2, 8) };
    let data = Data::open(&[path], &two, None).expect("opens");
    assert_eq!(refused_with(data.batch(0).map(|_| ())).0, "PL0526");
    let wide: Vec<u8> = [5u64, 6, 7].into_iter().flat_map(u64::to_le_bytes).collect();
    let path = tensor("wide.safetensors", Dtype::U64, &[1, 3], &wide);
    check(&Data::open(&[path], &two, None).expect("opens"), 0, &[5, 6], &[6, 7]);
}

/// Masked tokens: each has a label of its own, which counts where it is no `ignore_index`.
#[test]
fn labels_of_their_own_are_not_shifted() {
    let bytes = |it: &[i32]| it.iter().flat_map(|it| it.to_le_bytes()).collect::<Vec<u8>>();
    let (tokens, labels) = (bytes(&[1, 2, 3, 4, 5, 6]), bytes(&[-100, 7, -100, -100, 6, -100]));
    let write = |name: &str, labels_shape: &[usize]| {
        let view = |shape: &[usize], data| {
            TensorView::new(Dtype::I32, shape.to_vec(), data).expect("a tensor")
        };
        let views = [("tokens", view(&[2, 3], &tokens)), ("labels", view(labels_shape, &labels))];
        file(name, &safetensors::serialize(views, None).expect("serialized"))
    };
    let path = write("labels.safetensors", &[2, 3]);
    let data = Data::open(std::slice::from_ref(&path), &run(1, 3, 8), None).expect("opens");
    check(&data, 0, &[1, 2, 3], &[-100, 7, -100]);
    check(&data, 1, &[4, 5, 6], &[-100, 6, -100]);
    check(&data, 2, &[1, 2, 3], &[-100, 7, -100]);
    let narrow = Data::open(std::slice::from_ref(&path), &run(1, 3, 7), None).expect("opens");
    let expect = refused_with(narrow.batch(0).map(|_| ()));
    assert!(expect.0 == "PL0526" && expect.1.contains('7'), "{expect:?}");
    assert_eq!(refused(std::slice::from_ref(&path), &run(3, 3, 8)).0, "PL0522");
    let (code, text) = refused(&[path], &run(1, 2, 8));
    assert!(code == "PL0521" && text.contains("`tokens` are [N, 2]"), "{text}");
    let (code, text) = refused(&[write("other.safetensors", &[3, 2])], &run(1, 3, 8));
    assert!(code == "PL0521" && text.contains("`labels` are [3, 2]"), "{text}");
}

/// A label that does not count is no token; as the last of a row it is a label only.
#[test]
fn ignored_labels_are_no_tokens() {
    let values: Vec<u8> = [1i32, 2, -100].into_iter().flat_map(i32::to_le_bytes).collect();
    let path = tensor("ignored.safetensors", Dtype::I32, &[1, 3], &values);
    let data = Data::open(&[path], &run(1, 2, 8), None).expect("opens");
    check(&data, 0, &[1, 2], &[2, -100]);
}

#[test]
fn a_token_outside_the_vocabulary_is_named() {
    let paths =
        [file("inside.bin", &bytes16([1, 2, 3])), file("outside.bin", &bytes16([4, 50, 5]))];
    let data = Data::open(&paths, &run(1, 2, 50), None).expect("opens");
    data.batch(0).expect("the first window is fine");
    assert_eq!(
        refused_with(data.batch(1).map(|_| ())),
        (
            "PL0526",
            "`outside.bin`, position 1: token 50 is outside the vocabulary of 50; use the tokenizer \
             that the model was made for, or a larger vocabulary"
                .to_string()
        )
    );
}

#[test]
fn too_little_data_is_refused() {
    let path = file("little.bin", &bytes16(0..8));
    assert_eq!(
        refused(&[path], &run(2, 4, 100)),
        (
            "PL0522",
            "`little.bin` has 8 tokens, and one step needs 9 (a batch of 2 sequences of 4 and the \
             next token); give more data, or compile with a smaller batch or sequence"
                .to_string()
        )
    );
    let enough = file("enough.bin", &bytes16(0..9));
    Data::open(&[enough], &run(2, 4, 100), None).expect("exactly enough");
    let empty = [file("empty.txt", b""), file("empty.bin", b"")];
    let (code, message) = refused(&empty, &run(2, 4, 256));
    assert_eq!(code, "PL0522");
    assert!(message.starts_with("`empty.txt and 1 more` has 0 tokens"), "{message}");
}

#[test]
fn files_that_are_not_data_are_refused() {
    let two = run(2, 2, 100);
    assert_eq!(refused(&[PathBuf::from("/nowhere/x.bin")], &two).0, "PL0520");
    assert_eq!(refused(&[file("odd.bin", &[1, 2, 3])], &two).0, "PL0521");
    assert_eq!(refused(&[file("broken.safetensors", b"no header")], &two).0, "PL0521");
    let floats = tensor("floats.safetensors", Dtype::F32, &[2, 3], &[0; 24]);
    assert_eq!(
        refused(&[floats], &two),
        (
            "PL0521",
            "`floats.safetensors` is not a safetensors file with an integer tensor `tokens`: `tokens` \
             is F32"
                .to_string()
        )
    );
    let shape = tensor("shape.safetensors", Dtype::U8, &[2, 4], &[0; 8]);
    assert_eq!(
        refused(&[shape], &two),
        (
            "PL0524",
            "`shape.safetensors`: `tokens` is [2, 4], and this model needs [N, 3] or [steps, 2, 3] (a \
             row is a sequence and the next token)"
                .to_string()
        )
    );
    let rows = tensor("kinds.safetensors", Dtype::U8, &[2, 3], &[0; 6]);
    assert_eq!(refused(&[rows, file("kinds.txt", b"abcdefgh")], &two).0, "PL0525");
}

/// The same for the same seed, and learnable: most tokens have one usual successor.
#[test]
fn synthetic_data_is_a_fixed_random_walk() {
    let run = run(64, 63, 1000);
    let batch = Data::synthetic(&run, 7).batch(3).expect("endless");
    assert_eq!(batch, Data::synthetic(&run, 7).batch(3).expect("endless"));
    assert_ne!(batch, Data::synthetic(&run, 8).batch(3).expect("endless"));
    assert_ne!(batch, Data::synthetic(&run, 7).batch(4).expect("endless"));
    batch.check(&run).expect("within the vocabulary");
    let mut counts = vec![[0u32; 64]; 64];
    for (&token, &label) in batch.tokens.iter().zip(&batch.labels) {
        counts[token as usize][label as usize] += 1;
    }
    let usual: u32 = counts.iter().map(|it| it.iter().max().copied().unwrap_or(0)).sum();
    let share = f64::from(usual) / batch.tokens.len() as f64;
    assert!((0.7..0.85).contains(&share), "{share}");
}

#[test]
fn synthetic_data_fits_a_small_vocabulary() {
    let run = run(4, 9, 3);
    Data::synthetic(&run, 0).batch(0).expect("endless").check(&run).expect("within it");
}
