//! LeNet-5 as a worker uses it: it learns, repeats itself to the bit, and keeps its memory.

use std::sync::Arc;

use skep_data::{Column, Table};
use skep_learn::{Compute, LearnError, Task};
use skep_wire::{Dtype, Encoding, Frame, Layout};

fn task() -> Arc<dyn Task> {
    let mut tasks = skep_learn::tasks().into_iter();
    tasks.find(|task| task.name() == "lenet5").expect("it is built in")
}

fn compute() -> Box<dyn Compute> {
    task().compute(&task().defaults()).expect("a good model")
}

fn gradient_of(compute: &dyn Compute) -> Frame {
    let layout = Layout::of_gradient(compute.schema(), Encoding::F32).expect("lays out");
    Frame::zeros(Arc::new(layout))
}

fn rows(table: &Table, range: std::ops::Range<usize>) -> Table {
    let columns = ["image", "label"].map(|name| {
        let column = table.column(name).expect("MNIST has it");
        let width = column.bytes.len() / table.rows();
        Column {
            bytes: column.bytes[range.start * width..range.end * width].to_vec(),
            ..column.clone()
        }
    });
    Table::new(columns.to_vec()).expect("a good table")
}

#[test]
fn it_learns_digits_within_one_epoch() {
    let data = task().dataset(&task().defaults()).expect("built in");
    let mut compute = compute();
    let mut parameters = compute.initial(0).expect("draws");
    let mut gradient = gradient_of(compute.as_ref());
    let mut velocity = vec![0.0f32; parameters.floats().len()];
    for first in (0..data.train.rows() - 31).step_by(32) {
        compute.load(&parameters).expect("loads");
        let batch = rows(&data.train, first..first + 32);
        compute.gradient(&batch, 0, &mut gradient).expect("computes");
        let moved = parameters.floats_mut().iter_mut().zip(gradient.floats()).zip(&mut velocity);
        for ((parameter, gradient), velocity) in moved {
            *velocity = 0.9 * *velocity + gradient;
            *parameter -= 0.02 * *velocity;
        }
    }
    compute.load(&parameters).expect("loads");
    let mut correct = 0;
    for first in (0..data.test.rows()).step_by(50) {
        let batch = rows(&data.test, first..(first + 50).min(data.test.rows()));
        correct += compute.evaluate(&batch).expect("evaluates").correct.expect("counts");
    }
    let accuracy = correct as f64 / data.test.rows() as f64;
    println!("accuracy {accuracy}");
    assert!(accuracy > 0.9, "{accuracy}");
}

#[test]
fn the_same_batch_gives_the_same_bits() {
    let data = task().dataset(&task().defaults()).expect("built in");
    // 29 does not divide into vectors.
    let batch = rows(&data.train, 0..29);
    let run = || {
        let mut compute = compute();
        let mut gradient = gradient_of(compute.as_ref());
        compute.load(&compute.initial(3).expect("draws")).expect("loads");
        let loss = compute.gradient(&batch, 0, &mut gradient).expect("computes");
        let again = compute.gradient(&batch, 0, &mut gradient).expect("computes");
        assert_eq!(loss.to_bits(), again.to_bits());
        (loss.to_bits(), gradient.as_bytes().to_vec())
    };
    assert!(run() == run());
    assert_ne!(
        compute().initial(3).expect("draws").as_bytes(),
        compute().initial(4).expect("draws").as_bytes()
    );
}

#[test]
fn scores_of_a_row_do_not_depend_on_its_neighbours() {
    let data = task().dataset(&task().defaults()).expect("built in");
    let mut compute = compute();
    compute.load(&compute.initial(3).expect("draws")).expect("loads");
    let bits = |scores: Vec<f32>| scores.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    // 40 fill two parts and a half.
    let batch = data.test.slice(0..40).expect("there are more");
    let together = bits(compute.infer(&batch).expect("infers"));
    assert_eq!(together.len(), 40 * 10);
    let mut alone = Vec::new();
    for row in 0..40 {
        let row = batch.slice(row..row + 1).expect("one of them");
        alone.extend(bits(compute.infer(&row).expect("infers")));
    }
    assert_eq!(together, alone);
    // At every place of a part, among others than before.
    for at in 0..16 {
        let places: Vec<u64> =
            (0..16).map(|place| if place == at { 5 } else { place + 20 }).collect();
        let scores = bits(compute.infer(&batch.gather(&places).expect("rows")).expect("infers"));
        let at = at as usize;
        assert_eq!(scores[at * 10..(at + 1) * 10], alone[50..60], "at {at}");
    }
}

#[test]
fn memory_stays_flat() {
    let data = task().dataset(&task().defaults()).expect("built in");
    let batch = rows(&data.train, 0..16);
    let mut compute = compute();
    let mut gradient = gradient_of(compute.as_ref());
    let parameters = compute.initial(0).expect("draws");
    let mut work = |compute: &mut dyn Compute, times: usize| {
        for _ in 0..times {
            compute.load(&parameters).expect("loads");
            compute.evaluate(&batch).expect("evaluates");
            compute.evaluate(&batch).expect("evaluates");
            compute.gradient(&batch, 0, &mut gradient).expect("computes");
        }
    };
    work(compute.as_mut(), 20);
    let before = resident();
    work(compute.as_mut(), 150);
    let grown = resident().saturating_sub(before);
    // A graph that is kept would be 2 MB per pass.
    assert!(grown < 8 << 20, "grew by {grown} bytes");
}

fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux has it");
    let pages: u64 = statm.split(' ').nth(1).expect("a number").parse().expect("a number");
    pages * 4096
}

#[test]
fn bad_batches_and_frames_are_refused() {
    let mut compute = compute();
    let parameters = compute.initial(0).expect("draws");
    compute.load(&parameters).expect("loads");
    let mut gradient = gradient_of(compute.as_ref());
    assert!(matches!(compute.load(&gradient_of_other()), Err(LearnError::Layout { .. })));

    let column = |name: &str, dtype, shape: &[usize], bytes: Vec<u8>| Column {
        name: name.to_owned(),
        dtype,
        shape: shape.to_vec(),
        bytes,
    };
    let image = || column("image", Dtype::U8, &[28, 28], vec![0; 784]);
    let bad = [
        vec![image()],
        vec![image(), column("label", Dtype::U8, &[], vec![10])],
        vec![image(), column("label", Dtype::F32, &[], vec![0; 4])],
        vec![
            column("image", Dtype::I64, &[28, 28], vec![0; 6272]),
            column("label", Dtype::U8, &[], vec![1]),
        ],
        vec![
            column("image", Dtype::U8, &[784], vec![0; 784]),
            column("label", Dtype::U8, &[], vec![1]),
        ],
        vec![
            column("image", Dtype::U8, &[2, 28, 28], vec![0; 1568]),
            column("label", Dtype::U8, &[], vec![1]),
        ],
        vec![
            column("image", Dtype::U8, &[3, 3], vec![0; 9]),
            column("label", Dtype::U8, &[], vec![1]),
        ],
    ];
    for columns in bad {
        let table = Table::new(columns).expect("a good table");
        let result = compute.gradient(&table, 0, &mut gradient);
        assert!(matches!(result, Err(LearnError::Column { .. })), "{result:?}");
        assert!(compute.evaluate(&table).is_err());
    }
}

fn gradient_of_other() -> Frame {
    let layout = Layout::new(vec![("w".to_owned(), Dtype::F32, vec![3])]).expect("lays out");
    Frame::zeros(Arc::new(layout))
}
