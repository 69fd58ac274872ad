//! Layouts and mistakes of which there is no golden data.

use std::fs;
use std::path::{Path, PathBuf};

use checkpoint::{Checkpoint, CheckpointError, Metadata};

const CASE: &str = "../tests/golden/dcp/fsdp2_w2_adamw/dcp";

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(CASE)
}

/// A folder of its own for one test, with the files of a golden checkpoint.
fn folder(test: &str, files: &[&str]) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).expect("the target folder is writable");
    for it in files {
        fs::copy(golden().join(it), path.join(it)).expect("golden data");
    }
    path
}

#[track_caller]
fn error(path: &Path) -> String {
    Checkpoint::open(path).expect_err("it is no checkpoint").to_string()
}

/// `save(.., use_collectives=False)`: each rank has an index of what it saved, replicated values too.
#[test]
fn indices_of_ranks_are_read_together() {
    let path = folder("indices_of_ranks", &["__0_0.distcp", "__1_0.distcp"]);
    let index = Metadata::read(&fs::read(golden().join(".metadata")).unwrap()).unwrap();
    for rank in 0..2 {
        let mut part = index.clone();
        let name = format!("__{rank}_0.distcp");
        let file = part.files.iter().position(|it| *it == name).unwrap() as u32;
        for tensor in part.tensors.values_mut().filter(|it| it.chunks.len() > 1) {
            tensor.chunks.retain(|it| it.item.file == file);
        }
        let mut bytes = Vec::new();
        part.write(&mut bytes).unwrap();
        fs::write(path.join(format!("__{rank}.metadata")), bytes).unwrap();
    }
    let (found, expect) = (Checkpoint::open(&path).unwrap(), Checkpoint::open(&golden()).unwrap());
    assert!(found.tensors().map(|it| it.0).eq(expect.tensors().map(|it| it.0)));
    assert!(found.objects().eq(expect.objects()));
    for (key, tensor) in found.tensors() {
        assert_eq!(found.read_all(key).unwrap(), expect.read_all(key).unwrap(), "{key}");
        assert_eq!(tensor.chunks.len(), expect.tensor(key).unwrap().chunks.len(), "{key}");
    }
    // Without the index of one rank, what it saved is missing, and nothing is made up for it.
    fs::remove_file(path.join("__1.metadata")).unwrap();
    let found = Checkpoint::open(&path).unwrap();
    let error = found.read_all("model.norm.weight").unwrap_err();
    assert!(
        error.to_string().ends_with("`model.norm.weight` [8]: element [4] is in no box"),
        "{error}"
    );
}

#[test]
fn latest_names_the_checkpoint() {
    let path = folder("latest", &[]);
    let step = folder("latest/step-5", &[".metadata", "__0_0.distcp", "__1_0.distcp"]);
    assert!(error(&path).contains("it has no `latest`; name one of its folders, as in"));
    fs::write(path.join("latest"), "step-5\n").unwrap();
    assert_eq!(Checkpoint::open(&path).unwrap().path(), step);
    fs::write(path.join("latest"), "../latest/step-5").unwrap();
    let newest = "there is no such folder; the newest checkpoint that is there is `step-5`";
    assert!(error(&path).ends_with(&format!("names `../latest/step-5`, and {newest}")));
}

#[test]
fn what_is_no_checkpoint_is_called_so() {
    let path = folder("nothing", &[]);
    assert!(error(&path).ends_with("it has neither `.metadata` nor `*.safetensors`"));
    fs::write(path.join("__0_0.distcp"), "").unwrap();
    assert!(error(&path).ends_with("which is written last: the save was not finished"));
    assert!(error(&path.join("none")).starts_with("cannot read `"));
}

#[test]
fn a_key_that_is_misspelt_is_suggested() {
    let found = Checkpoint::open(&golden()).unwrap();
    let error = found.read_all("model.layers.1.attention.wqq.weight").unwrap_err();
    let CheckpointError::NoKey { near, .. } = &error else { panic!("{error}") };
    assert_eq!(near.as_deref(), Some("model.layers.1.attention.wq.weight"));
    let error = found.object("nothing like it").unwrap_err();
    assert!(matches!(error, CheckpointError::NoKey { near: None, .. }), "{error}");
}
