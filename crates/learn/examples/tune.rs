//! Scratch.
use std::sync::Arc;
use skep_data::{Column, Table};
use skep_wire::{Encoding, Frame, Layout};
use skep_learn::random::Generator;
fn pick(table: &Table, rows: &[usize]) -> Table {
    let columns = ["image", "label"].map(|name| {
        let column = table.column(name).unwrap();
        let width = column.bytes.len() / table.rows();
        Column { bytes: rows.iter().flat_map(|r| column.bytes[r * width..(r+1) * width].to_vec()).collect(), ..column.clone() }
    });
    Table::new(columns.to_vec()).unwrap()
}
fn main() {
    let a: Vec<f64> = std::env::args().skip(1).map(|x| x.parse().unwrap()).collect();
    let (batch, epochs, rate, momentum, decay, cosine, seed) = (a[0] as usize, a[1] as usize, a[2], a[3], a[4], a[5] > 0.0, a[6] as u64);
    let task = skep_learn::tasks().remove(0);
    let data = task.dataset("mnist").unwrap();
    let mut compute = task.compute(&task.defaults()).unwrap();
    let mut p = compute.initial(seed).unwrap();
    let mut g = Frame::zeros(Arc::new(Layout::of_gradient(compute.schema(), Encoding::F32).unwrap()));
    let mut v = vec![0.0f32; p.floats().len()];
    let n = data.train.rows() * 95 / 100;
    let total = (n / batch) * epochs;
    let mut gen_ = Generator::of(seed, "order");
    let mut step = 0;
    let mut out = String::new();
    for epoch in 0..epochs {
        let mut order: Vec<usize> = (0..n).collect();
        for i in (1..n).rev() { order.swap(i, (gen_.bits() % (i as u64 + 1)) as usize); }
        for rows in order.chunks_exact(batch) {
            let f = if cosine { 0.5 * (1.0 + (std::f64::consts::PI * step as f64 / total as f64).cos()) } else { 1.0 };
            compute.load(&p).unwrap();
            compute.gradient(&pick(&data.train, rows), 0, &mut g).unwrap();
            for ((p, g), v) in p.floats_mut().iter_mut().zip(g.floats()).zip(&mut v) {
                *v = momentum as f32 * *v + g + decay as f32 * *p; *p -= (rate * f) as f32 * *v;
            }
            step += 1;
        }
        compute.load(&p).unwrap();
        let mut c = 0;
        for f in (0..data.test.rows()).step_by(50) { c += compute.evaluate(&pick(&data.test, &(f..f + 50).collect::<Vec<_>>())).unwrap().correct.unwrap(); }
        out += &format!(" {:.2}", 100.0 * c as f64 / data.test.rows() as f64);
        let _ = epoch;
    }
    println!("{a:?}:{out}");
}
