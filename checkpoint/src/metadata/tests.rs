//! Indices as they are written and read back.

use super::*;

fn key(it: &str) -> PathPart {
    PathPart::Key(it.to_string())
}

fn chunk(offsets: &[u64], sizes: &[u64], file: u32, offset: u64) -> StoredChunk {
    let chunk = Chunk { offsets: offsets.into(), sizes: sizes.into() };
    StoredChunk { chunk, item: Item { file, offset, len: 1600, encoding: Encoding::Plain } }
}

fn example() -> Metadata {
    let weight = StoredTensor {
        dtype: StoredType::Bf16,
        shape: vec![6, 2],
        chunks: vec![chunk(&[0, 0], &[3, 2], 0, 0), chunk(&[3, 0], &[3, 2], 1, 1 << 40)],
        path: vec![key("model"), key("w")],
    };
    let mut scalar = weight.clone();
    (scalar.shape, scalar.path) = (Vec::new(), vec![key("list"), PathPart::Index(0)]);
    scalar.chunks = vec![chunk(&[], &[], 1, 9)];
    let item = Item { file: 0, offset: 1600, len: 704, encoding: Encoding::Zstd };
    let object = StoredObject { item, path: vec![key("lr")] };
    Metadata {
        files: vec!["__0_0.distcp".into(), "__1_0.distcp".into()],
        tensors: [("model.w".into(), weight), ("list.0".into(), scalar)].into(),
        objects: [("lr".into(), object)].into(),
        save_id: Some("7".into()),
        problems: Vec::new(),
    }
}

fn written(it: &Metadata) -> Vec<u8> {
    let mut res = Vec::new();
    it.write(&mut res).unwrap();
    res
}

#[test]
fn an_index_is_read_as_written() {
    let mut read = Metadata::read(&written(&example())).unwrap();
    // Files are numbered as they come.
    assert_eq!(read.files, ["__1_0.distcp", "__0_0.distcp"]);
    read.files.reverse();
    for it in read.tensors.values_mut().flat_map(|it| &mut it.chunks) {
        it.item.file = 1 - it.item.file;
    }
    read.objects.values_mut().for_each(|it| it.item.file = 1 - it.item.file);
    assert_eq!(read, example());
}

/// A thousand entries make a batch, in a dict that a list of batches interrupts.
#[test]
fn more_entries_than_a_batch_are_all_read() {
    let mut index = example();
    let many = (0..2501).map(|it| chunk(&[it, 0], &[1, 2], 0, it));
    let many = StoredTensor {
        shape: vec![2501, 2],
        chunks: many.collect(),
        ..index.tensors["model.w"].clone()
    };
    for i in 0..1200 {
        let mut object = index.objects["lr"].clone();
        object.path = vec![key(&format!("k{i}"))];
        index.objects.insert(format!("k{i}"), object);
        index.tensors.insert(
            format!("a{i}"),
            StoredTensor { path: vec![key(&format!("a{i}"))], ..index.tensors["list.0"].clone() },
        );
    }
    index.tensors.insert("a10.m".into(), StoredTensor { path: Vec::new(), ..many });
    let read = Metadata::read(&written(&index)).unwrap();
    assert_eq!(read.problems, [""; 0]);
    assert_eq!(read.tensors.len(), 1203);
    assert_eq!(read.objects.len(), 1201);
    for (key, tensor) in &index.tensors {
        let ends = |it: &StoredTensor| {
            it.chunks.iter().map(|it| (it.chunk.clone(), it.item.offset)).collect::<Vec<_>>()
        };
        assert_eq!(ends(&read.tensors[key]), ends(tensor), "{key}");
        assert_eq!(read.tensors[key].path, tensor.path);
    }
}
