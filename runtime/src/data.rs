//! Token data: the same global batches on every mesh.
//!
//! Sample `step * batch + row` (steps from 0) is `sequence + 1` tokens; all but the last are inputs,
//! all but the first are labels. Files are memory-mapped and joined in the order given:
//!
//! ```text
//! .bin                  u8, u16 or u32, little-endian: one stream, cut every `sequence` tokens
//! .safetensors          integers `tokens`: [N, sequence + 1], or [steps, batch, sequence + 1]
//!                       or `tokens` and `labels`, both [N, sequence]: labels of their own
//! any other             bytes are tokens: one stream, cut every `sequence` bytes
//! none                  a random walk that a model can learn, see [`Data::synthetic`]
//! ```
//!
//! Streams and rows start over at their end; data of fixed steps does not. A token outside the
//! vocabulary is an error; a label may also be the model's `ignore_index`.

use std::path::{Path, PathBuf};

use ir::random::philox4x32_10;
use ir::run::Run;
use safetensors::Dtype;
use serde::{Deserialize, Serialize};

use crate::error::RunError;
use crate::map::Mapped;
use crate::weights::{halves, parse};

/// One global batch, rows of `sequence` each.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Batch {
    /// Inputs.
    pub tokens: Vec<i32>,
    /// What follows each input.
    pub labels: Vec<i32>,
}

/// Element type of a `.bin` file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenWidth {
    /// One byte: text as bytes.
    U8,
    /// Two bytes, little-endian.
    U16,
    /// Four bytes, little-endian.
    U32,
}

/// Where batches come from.
#[derive(Debug)]
pub struct Data {
    run: Run,
    source: Source,
}

#[derive(Debug)]
enum Source {
    Synthetic { seed: u64 },
    Files(Files),
}

/// The data of a run, as its checkpoints describe it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataRecord {
    /// The files in their order; none for generated tokens.
    pub files: Vec<FileRecord>,
    /// Element type of the `.bin` files among them.
    pub token_type: Option<TokenWidth>,
    /// Tokens of a sample, which `planc.sample` counts.
    pub sequence: u64,
}

/// A file of data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// The path at which it was.
    pub path: PathBuf,
    /// The size of the file.
    pub bytes: u64,
    /// BLAKE3 of what [`Data::record`] hashes of it; absent on ranks that hash nothing.
    pub digest: Option<String>,
}

/// Files joined end to end. Sample `i` starts at token `i * stride`.
#[derive(Debug)]
struct Files {
    files: Vec<TokenFile>,
    kind: Kind,
    stride: u64,
    samples: u64,
    /// Element type of `.bin` files, if there are any.
    width: Option<TokenWidth>,
}

#[derive(Debug)]
struct TokenFile {
    map: Mapped,
    element: Element,
    /// Byte at which tokens start.
    start: usize,
    tokens: u64,
    /// Type and first byte of the labels, if each token has one of its own.
    labels: Option<(Element, usize)>,
}

/// How samples lie in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Stream,
    Rows,
    Steps,
    Labelled,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Element {
    U8,
    U16,
    U32,
    U64,
    I16,
    I32,
    I64,
}

impl Batch {
    /// Whether a model with this vocabulary can read it.
    pub fn check(&self, run: &Run) -> Result<(), RunError> {
        let fail = |what: &str, position: usize, token: i32| RunError::TokenOutsideVocab {
            file: format!("{what} of the batch"),
            position: position as u64,
            token: i64::from(token),
            vocab: run.vocab,
        };
        for (i, &token) in self.tokens.iter().enumerate() {
            if !is_token(token.into(), run) {
                return Err(fail("tokens", i, token));
            }
        }
        for (i, &label) in self.labels.iter().enumerate() {
            if !is_label(label.into(), run) {
                return Err(fail("labels", i, label));
            }
        }
        Ok(())
    }
}

fn is_token(token: i64, run: &Run) -> bool {
    u64::try_from(token).is_ok_and(|it| it < run.vocab)
}

fn is_label(token: i64, run: &Run) -> bool {
    is_token(token, run) || token == run.ignore_index
}

impl Data {
    /// Opens files. `width` is that of `.bin` files; by default the one that the vocabulary needs.
    pub fn open(paths: &[PathBuf], run: &Run, width: Option<TokenWidth>) -> Result<Data, RunError> {
        let wide = run.vocab > 1 << 16;
        let width = width.unwrap_or(if wide { TokenWidth::U32 } else { TokenWidth::U16 });
        let mut files = Vec::new();
        let mut kinds = Vec::new();
        for path in paths {
            let (file, kind) = open(path, run, width)?;
            files.push(file);
            kinds.push(kind);
        }
        let Some(&kind) = kinds.first() else {
            return Ok(Data::synthetic(run, run.seed));
        };
        if let Some(other) = kinds.iter().position(|&it| it != kind) {
            let (first, second) = (paths[0].clone(), paths[other].clone());
            return Err(RunError::DataKinds { first, second });
        }
        let tokens: u64 = files.iter().map(|it| it.tokens).sum();
        let (sequence, next) = (run.sequence, run.sequence + 1);
        // Tokens of a sample, and from one to the next.
        let (row, stride, samples) = match kind {
            Kind::Stream => (next, sequence, tokens.saturating_sub(1) / sequence.max(1)),
            Kind::Rows | Kind::Steps => (next, next, tokens / next),
            Kind::Labelled => (sequence, sequence, tokens / sequence.max(1)),
        };
        let is_bin = |it: &PathBuf| it.extension().is_some_and(|it| it == "bin");
        let width = paths.iter().any(is_bin).then_some(width);
        let files = Files { files, kind, stride, samples, width };
        if samples < run.global_batch {
            return Err(RunError::DataTooShort {
                file: files.name(),
                found: tokens,
                needed: (run.global_batch - 1) * stride + row,
                batch: run.global_batch,
                sequence: run.sequence,
            });
        }
        Ok(Data { run: run.clone(), source: Source::Files(files) })
    }

    /// Endless samples from a fixed random process over the first 64 tokens of the vocabulary: each
    /// token has four successors, taken with probability 3/4, 1/8, 1/16 and 1/16, so that a loss that
    /// starts at `ln(vocab)` can fall to about 0.8. The same for the same seed.
    pub fn synthetic(run: &Run, seed: u64) -> Data {
        Data { run: run.clone(), source: Source::Synthetic { seed } }
    }

    /// Describes the data for checkpoints. With `hash`, each file has a digest of its size and its content; of a file
    /// beyond `256 MiB / files` (64 KiB at least, 64 MiB at most), of 16 pieces of that size in all: the first bytes,
    /// the last, and pieces evenly between.
    pub fn record(&self, hash: bool) -> Result<DataRecord, RunError> {
        let sequence = self.run.sequence;
        let Source::Files(Files { files, width, .. }) = &self.source else {
            return Ok(DataRecord { files: Vec::new(), token_type: None, sequence });
        };
        let n = files.len() as u64;
        let record = |it: &TokenFile| {
            let (path, bytes) = (&it.map.path, it.map.bytes());
            // A run may be started again elsewhere. JSON has text only.
            let path = path.canonicalize().map_err(|it| RunError::read(path, &it))?;
            let path = PathBuf::from(path.to_string_lossy().into_owned());
            let digest = hash.then(|| digest(bytes, n));
            Ok(FileRecord { path, bytes: bytes.len() as u64, digest })
        };
        let files = files.iter().map(record).collect::<Result<_, RunError>>()?;
        Ok(DataRecord { files, token_type: *width, sequence })
    }

    /// How many steps there are, if that is fixed.
    pub fn steps(&self) -> Option<u64> {
        match &self.source {
            Source::Files(it) if it.kind == Kind::Steps => Some(it.samples / self.run.global_batch),
            Source::Files(_) | Source::Synthetic { .. } => None,
        }
    }

    /// Whether there is data for this many steps.
    pub fn check_steps(&self, steps: u64) -> Result<(), RunError> {
        match (&self.source, self.steps()) {
            (Source::Files(files), Some(held)) if steps > held => {
                Err(RunError::DataExhausted { file: files.name(), held, step: held + 1 })
            }
            _ => Ok(()),
        }
    }

    /// The global batch of a step, from 0.
    pub fn batch(&self, step: u64) -> Result<Batch, RunError> {
        if let Source::Files(_) = self.source {
            self.check_steps(step + 1)?;
        }
        let run = &self.run;
        let mut row = vec![0i64; run.sequence as usize + 1];
        let mut res = Batch::default();
        for i in 0..run.global_batch {
            let sample = step * run.global_batch + i;
            match &self.source {
                Source::Files(files) if files.kind == Kind::Labelled => {
                    files.read_labelled(run, sample, &mut res)?;
                    continue;
                }
                Source::Synthetic { seed } => walk(run, *seed, sample, &mut row),
                Source::Files(files) => files.read(run, sample, &mut row)?,
            }
            let (inputs, labels) = (&row[..row.len() - 1], &row[1..]);
            res.tokens.extend(inputs.iter().map(|&it| it as i32));
            res.labels.extend(labels.iter().map(|&it| it as i32));
        }
        Ok(res)
    }
}

/// See [`Data::record`].
fn digest(bytes: &[u8], files: u64) -> String {
    const PIECES: usize = 16;
    let most = ((256 << 20) / files).clamp(64 << 10, 64 << 20) as usize;
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    if bytes.len() <= most {
        hasher.update(bytes);
    } else {
        let piece = most / PIECES;
        for i in 0..PIECES {
            // In 128 bits: a file may have as many bytes as fit into 64.
            let last = (bytes.len() - piece) as u128;
            let at = (last * i as u128 / (PIECES as u128 - 1)) as usize;
            hasher.update(&bytes[at..at + piece]);
        }
    }
    hasher.finalize().to_hex().to_string()
}

impl TokenWidth {
    fn name(self) -> &'static str {
        match self {
            TokenWidth::U8 => "u8",
            TokenWidth::U16 => "u16",
            TokenWidth::U32 => "u32",
        }
    }
}

impl DataRecord {
    /// Each way in which `now` is not this data. Sizes are compared before digests, and digests where both are known;
    /// a file may have moved.
    pub fn differences(&self, now: &DataRecord) -> Vec<String> {
        let mut res = Vec::new();
        if self.files.len() != now.files.len() {
            res.push(format!(
                "there are {} files, and there were {}",
                now.files.len(),
                self.files.len()
            ));
        }
        if let (Some(then), Some(now)) = (self.token_type, now.token_type)
            && then != now
        {
            res.push(format!("tokens are {}, and were {}", now.name(), then.name()));
        }
        for (then, now) in self.files.iter().zip(&now.files) {
            let (old, new) = (then.path.display(), now.path.display());
            if then.bytes != now.bytes {
                let (was, is) = (then.bytes, now.bytes);
                res.push(format!("`{new}` has {is} bytes, and `{old}` had {was}"));
            } else if then.digest.is_some() && now.digest.is_some() && then.digest != now.digest {
                res.push(format!("`{new}` has the size of `{old}`, and other content"));
            }
        }
        res
    }
}

/// One sample of [`Data::synthetic`].
fn walk(run: &Run, seed: u64, sample: u64, row: &mut [i64]) {
    const TOKENS: u64 = 64;
    let used = run.vocab.clamp(1, TOKENS) as u32;
    let random = |counter: [u32; 4]| philox4x32_10(counter, halves(seed))[0];
    let [low, high] = halves(sample);
    let mut token = random([low, high, 0, 0]) % used;
    for (i, out) in row.iter_mut().enumerate() {
        *out = token.into();
        let choice = match random([low, high, i as u32, 1]) >> 28 {
            0..12 => 0,
            12..14 => 1,
            14 => 2,
            _ => 3,
        };
        token = random([token, choice, 0, 2]) % used;
    }
}

impl Files {
    /// The tokens of a sample, checked.
    fn read(&self, run: &Run, sample: u64, row: &mut [i64]) -> Result<(), RunError> {
        let start = sample % self.samples * self.stride;
        let last = row.len() - 1;
        for (i, out) in row.iter_mut().enumerate() {
            let (file, position) = self.locate(start + i as u64);
            let token = file.token(position as usize);
            let input = i == last || is_token(token, run);
            let label = i == 0 || is_label(token, run);
            if !input || !label {
                return Err(RunError::TokenOutsideVocab {
                    file: file.map.path.display().to_string(),
                    position,
                    token,
                    vocab: run.vocab,
                });
            }
            *out = token;
        }
        Ok(())
    }

    /// Adds the tokens of a sample and their own labels, checked.
    fn read_labelled(&self, run: &Run, sample: u64, batch: &mut Batch) -> Result<(), RunError> {
        let start = sample % self.samples * self.stride;
        for i in start..start + run.sequence {
            let (file, position) = self.locate(i);
            let (token, label) = (file.token(position as usize), file.label(position as usize));
            let wrong = if is_token(token, run) { label } else { token };
            if !is_token(token, run) || !is_label(label, run) {
                return Err(RunError::TokenOutsideVocab {
                    file: file.map.path.display().to_string(),
                    position,
                    token: wrong,
                    vocab: run.vocab,
                });
            }
            batch.tokens.push(token as i32);
            batch.labels.push(label as i32);
        }
        Ok(())
    }

    /// The file that has a token, and where.
    fn locate(&self, position: u64) -> (&TokenFile, u64) {
        let mut rest = position;
        for file in &self.files {
            if rest < file.tokens {
                return (file, rest);
            }
            rest -= file.tokens;
        }
        unreachable!("samples end where the last file does")
    }

    fn name(&self) -> String {
        let first = self.files[0].map.path.display().to_string();
        match self.files.len() - 1 {
            0 => first,
            more => format!("{first} and {more} more"),
        }
    }
}

fn open(path: &Path, run: &Run, width: TokenWidth) -> Result<(TokenFile, Kind), RunError> {
    let map = Mapped::open(path)?;
    match path.extension().and_then(|it| it.to_str()) {
        Some("safetensors") => open_tensor(map, run),
        Some("bin") => {
            let element = match width {
                TokenWidth::U8 => Element::U8,
                TokenWidth::U16 => Element::U16,
                TokenWidth::U32 => Element::U32,
            };
            let (len, size) = (map.bytes().len(), element.bytes());
            if !len.is_multiple_of(size) {
                let why = format!("{len} bytes are not a multiple of {size}");
                let path = path.to_path_buf();
                return Err(RunError::BadFile { path, expected: "a token stream", why });
            }
            let tokens = (len / size) as u64;
            Ok((TokenFile { map, element, start: 0, tokens, labels: None }, Kind::Stream))
        }
        _ => {
            let tokens = map.bytes().len() as u64;
            let element = Element::U8;
            Ok((TokenFile { map, element, start: 0, tokens, labels: None }, Kind::Stream))
        }
    }
}

fn open_tensor(map: Mapped, run: &Run) -> Result<(TokenFile, Kind), RunError> {
    let bad = |why: String| RunError::BadFile {
        path: map.path.clone(),
        expected: "a safetensors file with an integer tensor `tokens`",
        why,
    };
    let tensors = parse(&map)?;
    let view = tensors.tensor("tokens").map_err(|_| {
        let mut names = tensors.names();
        names.sort_unstable();
        names.truncate(5);
        bad(format!("it has no `tokens`, but {}", names.join(", ")))
    })?;
    let element = |name: &str, dtype: Dtype| match dtype {
        Dtype::U8 => Ok(Element::U8),
        Dtype::U16 => Ok(Element::U16),
        Dtype::U32 => Ok(Element::U32),
        Dtype::U64 => Ok(Element::U64),
        Dtype::I16 => Ok(Element::I16),
        Dtype::I32 => Ok(Element::I32),
        Dtype::I64 => Ok(Element::I64),
        other => Err(bad(format!("`{name}` is {other:?}"))),
    };
    let labels = tensors.tensor("labels").ok();
    let (row, batch) = (run.sequence + 1, run.global_batch);
    let kind = match *view.shape() {
        [_, found] if labels.is_some() && found as u64 == run.sequence => Kind::Labelled,
        _ if labels.is_some() => {
            let (found, sequence) = (view.shape(), run.sequence);
            let why =
                format!("with `labels`, `tokens` are [N, {sequence}], and these are {found:?}");
            return Err(bad(why));
        }
        [_, found] if found as u64 == row => Kind::Rows,
        [_, rows, found] if found as u64 == row && rows as u64 == batch => Kind::Steps,
        _ => {
            let (path, found) = (map.path.clone(), view.shape().to_vec());
            return Err(RunError::DataShape { path, found, row, batch });
        }
    };
    if let Some(it) = labels.as_ref().filter(|it| it.shape() != view.shape()) {
        let why = format!("`labels` are {:?} and `tokens` {:?}", it.shape(), view.shape());
        return Err(bad(why));
    }
    let start = |data: &[u8]| data.as_ptr() as usize - map.bytes().as_ptr() as usize;
    let labels = match &labels {
        Some(it) => Some((element("labels", it.dtype())?, start(it.data()))),
        None => None,
    };
    let (element, start) = (element("tokens", view.dtype())?, start(view.data()));
    let tokens = view.shape().iter().product::<usize>() as u64;
    Ok((TokenFile { map, element, start, tokens, labels }, kind))
}

impl TokenFile {
    fn token(&self, index: usize) -> i64 {
        self.integer(self.element, self.start, index)
    }

    /// The label of a token that has its own.
    fn label(&self, index: usize) -> i64 {
        let (element, start) = self.labels.expect("such files are of a kind of their own");
        self.integer(element, start, index)
    }

    fn integer(&self, element: Element, start: usize, index: usize) -> i64 {
        let size = element.bytes();
        let at = start + index * size;
        let raw = &self.map.bytes()[at..at + size];
        let mut word = [0; 8];
        word[..size].copy_from_slice(raw);
        let word = u64::from_le_bytes(word);
        match element {
            Element::U8 | Element::U16 | Element::U32 => word as i64,
            // Beyond i64 it is outside any vocabulary too.
            Element::U64 => i64::try_from(word).unwrap_or(i64::MAX),
            Element::I16 => i64::from(word as i16),
            Element::I32 => i64::from(word as i32),
            Element::I64 => word as i64,
        }
    }
}

impl Element {
    fn bytes(self) -> usize {
        match self {
            Element::U8 => 1,
            Element::U16 | Element::I16 => 2,
            Element::U32 | Element::I32 => 4,
            Element::U64 | Element::I64 => 8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Size, ends and pieces of a large file are hashed, and the bytes between the pieces are not.
    #[test]
    fn digests_of_large_files_are_of_pieces() {
        let bytes = vec![0; 1 << 20];
        let files = (256 << 20) / (64 << 10);
        let changed = |at: usize| {
            let mut changed = bytes.clone();
            changed[at] = 1;
            digest(&changed, files) != digest(&bytes, files)
        };
        assert!([0, 4095, bytes.len() - 1, bytes.len() - 4096].into_iter().all(changed));
        assert!(!changed(4096 + 100));
        assert_ne!(digest(&bytes, files), digest(&bytes[1..], files));
        let whole = |bytes: &[u8]| digest(bytes, 1);
        let mut one = bytes.clone();
        one[5000] = 1;
        assert_ne!(whole(&bytes), whole(&one), "what is small enough is hashed as a whole");
    }
}
